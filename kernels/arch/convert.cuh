// cvt: between storage elements and accumulators, rounding to nearest even.
#pragma once

#include "common/float8.cuh"
#include "common/types.cuh"

namespace cupyflash {

__device__ inline float to_accumulator(float value) { return value; }
__device__ inline double to_accumulator(double value) { return value; }

__device__ inline float to_accumulator(Float16 value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
}

__device__ inline float to_accumulator(BFloat16 value) {
  return __uint_as_float(unsigned(value.bits) << 16);
}

template <class Element, class T>
struct FromAccumulator {
  static __device__ Element convert(T value) { return Element(value); }
};

template <>
struct FromAccumulator<Float16, float> {
  static __device__ Float16 convert(float value) {
    Float16 result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
  }
};

template <>
struct FromAccumulator<BFloat16, float> {
  // The instruction needs sm_80; these few integer operations run anywhere, outside the main loop.
  static __device__ BFloat16 convert(float value) {
    const unsigned bits = __float_as_uint(value);
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    const unsigned rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    return {static_cast<unsigned short>(is_nan ? 0x7fffu : rounded >> 16)};
  }
};

template <>
struct FromAccumulator<Float8E4M3, float> {
  static __device__ Float8E4M3 convert(float value) { return to_float8(value); }
};

template <class Element, class T>
__device__ inline Element from_accumulator(T value) {
  return FromAccumulator<Element, T>::convert(value);
}

}  // namespace cupyflash
