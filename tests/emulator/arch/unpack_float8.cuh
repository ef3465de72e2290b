// Host version of kernels/arch/unpack_float8.cuh, the way of GPUs before sm_89.
#pragma once

#include "arch/pack.cuh"
#include "common/float8.cuh"

namespace cupyflash {

template <DataType dtype>
unsigned unpack_float8_pair(unsigned bytes) {
  const float2 placed = unpack_pair<DataType::float16>(place_float8(bytes));
  return pack_pair<dtype>(placed.x * 256, placed.y * 256);
}

template <DataType dtype>
void unpack_float8(unsigned bytes, unsigned& low, unsigned& high) {
  low = unpack_float8_pair<dtype>(bytes);
  high = unpack_float8_pair<dtype>(bytes >> 16);
}

}  // namespace cupyflash
