// Scalar arithmetic for float and double alike. Nothing here is "fast math": float32 results are
// as accurate as a dense float32 computation.
#pragma once

namespace cupyflash {

__device__ constexpr int ceil_div(int count, int size) { return (count + size - 1) / size; }

template <class T>
constexpr T infinity = T(__builtin_bit_cast(double, 0x7ff0000000000000ull));

__device__ inline float maximum(float a, float b) { return fmaxf(a, b); }
__device__ inline double maximum(double a, double b) { return fmax(a, b); }
__device__ inline int maximum(int a, int b) { return a > b ? a : b; }
__device__ inline int minimum(int a, int b) { return a < b ? a : b; }

__device__ inline float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ inline double multiply_add(double a, double b, double c) { return fma(a, b, c); }

__device__ inline float hyperbolic_tangent(float x) { return tanhf(x); }
__device__ inline double hyperbolic_tangent(double x) { return tanh(x); }

}  // namespace cupyflash
