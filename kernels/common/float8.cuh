// e4m3 numbers: 4 bits of exponent, 3 of mantissa, no infinity; on any GPU, without an instruction.
#pragma once

#include "common/types.cuh"

namespace cupyflash {

/// Exact. The bits move to where float32 has them, whose exponents are 120 further on.
__device__ inline float to_accumulator(Float8E4M3 value) {
  constexpr float two_to_120 = 1329227995784915872903807060280344576.0f;
  const unsigned magnitude = value.bits & 0x7fu;
  const float moved = __uint_as_float(magnitude << 20) * two_to_120;
  const float number = magnitude == 0x7fu ? __uint_as_float(0x7fc00000u) : moved;
  return value.bits & 0x80u ? -number : number;
}

}  // namespace cupyflash
