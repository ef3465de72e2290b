// Scalar arithmetic for float and double alike. Nothing here is "fast math": float32 results are
// as accurate as a dense float32 computation.
#pragma once

#include "arch/exponential.cuh"

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

/// exp(score - shift). The difference is taken first, in natural units: it is exactly 0 for equal
/// scores however large (a fused `score * log2e - shift * log2e` is not), so exp is exactly 1.
__device__ inline float exp_difference(float score, float shift) {
  constexpr float log2e = 1.4426950408889634f;
  return exp2_hardware((score - shift) * log2e);
}
__device__ inline double exp_difference(double score, double shift) { return exp(score - shift); }

}  // namespace cupyflash
