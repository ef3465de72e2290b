// Host version of kernels/arch/pack.cuh.
#pragma once

#include "common/types.cuh"

namespace cupyflash {

template <DataType dtype>
unsigned pack_pair(float low, float high) {
  if constexpr (dtype == DataType::bfloat16) {
    return emulator::to_bfloat16(low) | unsigned(emulator::to_bfloat16(high)) << 16;
  } else {
    return emulator::to_half(low) | unsigned(emulator::to_half(high)) << 16;
  }
}

template <DataType dtype>
float2 unpack_pair(unsigned pair) {
  const auto low = static_cast<unsigned short>(pair),
             high = static_cast<unsigned short>(pair >> 16);
  if constexpr (dtype == DataType::bfloat16) {
    return {emulator::from_bfloat16(low), emulator::from_bfloat16(high)};
  } else {
    return {emulator::from_half(low), emulator::from_half(high)};
  }
}

template <DataType dtype>
unsigned minimum_pair(unsigned a, unsigned b) {
  const float2 x = unpack_pair<dtype>(a), y = unpack_pair<dtype>(b);
  return pack_pair<dtype>(fminf(x.x, y.x), fminf(x.y, y.y));
}

}  // namespace cupyflash
