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

/// Rounds to nearest even, and to the largest number what is beyond it; NaN keeps its sign.
__device__ inline Float8E4M3 to_float8(float value) {
  constexpr float least = 0.015625f;  // normal number, 2^-6; below, numbers are multiples of 2^-9
  const unsigned bits = __float_as_uint(value), sign = bits >> 24 & 0x80u;
  const float magnitude = __uint_as_float(bits & 0x7fffffffu);
  unsigned code;
  if (magnitude != magnitude) {
    code = 0x7fu;
  } else if (magnitude < least) {
    constexpr float units = 16384.0f;  // its last place is 2^-9
    code = __float_as_uint(magnitude + units) - __float_as_uint(units);
  } else {
    const unsigned clamped = __float_as_uint(magnitude < 448.0f ? magnitude : 448.0f);
    code = ((clamped + 0x7ffffu + (clamped >> 20 & 1u)) >> 20) - (120u << 3);
  }
  return {static_cast<unsigned char>(sign | code)};
}

/// Two numbers where float16 has the bits of such, 2^-8 of what they are: one of the lower two
/// bytes in each half. NaN stays that.
__device__ inline unsigned place_float8(unsigned bytes) {
  const unsigned halves = __byte_perm(bytes, 0, 0x1404);
  const unsigned magnitudes = (halves & 0x7f007f00u) >> 1;
  const unsigned nan = (magnitudes + 0x00800080u) & 0x40004000u;  // of the only one that carries
  return (halves & 0x80008000u) | magnitudes | nan;
}

}  // namespace cupyflash
