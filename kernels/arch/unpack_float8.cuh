// cvt from e4m3 (sm_89): four bytes of one register to two pairs of 16-bit elements. Exact.
#pragma once

#include "arch/pack.cuh"
#include "common/float8.cuh"

namespace cupyflash {

/// The lower two bytes.
template <DataType dtype>
__device__ inline unsigned unpack_float8_pair(unsigned bytes) {
  unsigned pair;  // of float16
#if __CUDA_ARCH__ >= 890
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low;}"
      : "=r"(pair)
      : "r"(bytes));
#else
  constexpr unsigned two_to_8 = 0x5c005c00u;
  asm("mul.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(place_float8(bytes)), "r"(two_to_8));
#endif
  if constexpr (dtype == DataType::bfloat16) {  // by way of float32, whose upper half it is
    const float2 wide = unpack_pair<DataType::float16>(pair);
    pair = __byte_perm(__float_as_uint(wide.x), __float_as_uint(wide.y), 0x7632);
  }
  return pair;
}

/// `low` takes what comes first in memory.
template <DataType dtype>
__device__ inline void unpack_float8(unsigned bytes, unsigned& low, unsigned& high) {
  low = unpack_float8_pair<dtype>(bytes);
  high = unpack_float8_pair<dtype>(bytes >> 16);
}

}  // namespace cupyflash
