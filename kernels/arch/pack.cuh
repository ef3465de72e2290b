// cvt to pairs (sm_80): two float32 to two 16-bit elements in one register.
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

}  // namespace cupyflash
