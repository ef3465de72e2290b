// cvt to pairs (sm_80): two float32 to two 16-bit elements in one register, and back.
#pragma once

#include "common/types.cuh"

namespace cupyflash {

/// `low` takes the lower half, which comes first in memory; rounds to nearest even.
template <DataType dtype>
__device__ inline unsigned pack_pair(float low, float high) {
  unsigned pair;
  if constexpr (dtype == DataType::bfloat16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    static_assert(dtype == DataType::float16);
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
}

/// The lesser of each half.
template <DataType dtype>
__device__ inline unsigned minimum_pair(unsigned a, unsigned b) {
  unsigned result;
  if constexpr (dtype == DataType::bfloat16) {
    asm("min.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  } else {
    static_assert(dtype == DataType::float16);
    asm("min.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  }
  return result;
}

/// The two elements of a pair, lower half first.
template <DataType dtype>
__device__ inline float2 unpack_pair(unsigned pair) {
  float2 result;
  if constexpr (dtype == DataType::bfloat16) {
    result.x = __uint_as_float(pair << 16);
    result.y = __uint_as_float(pair & 0xffff0000u);
  } else {
    static_assert(dtype == DataType::float16);
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
        : "=f"(result.x), "=f"(result.y)
        : "r"(pair));
  }
  return result;
}

}  // namespace cupyflash
