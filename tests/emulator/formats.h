// Storage formats of 16 and 8 bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

namespace emulator {

inline float from_half(unsigned short bits) {
  _Float16 value;
  memcpy(&value, &bits, sizeof(value));
  return float(value);
}

inline unsigned short to_half(float value) {
  const _Float16 rounded = _Float16(value);
  unsigned short bits;
  memcpy(&bits, &rounded, sizeof(bits));
  return bits;
}

inline float from_bfloat16(unsigned short bits) {
  const unsigned word = unsigned(bits) << 16;
  float value;
  memcpy(&value, &word, sizeof(value));
  return value;
}

inline unsigned short to_bfloat16(float value) {
  unsigned bits;
  memcpy(&bits, &value, sizeof(bits));
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return 0x7fff;
  }
  return static_cast<unsigned short>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/// Four bits of exponent, three of mantissa; no infinity.
inline float from_e4m3(unsigned char bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  const float magnitude = exponent == 15 && mantissa == 7 ? NAN
                          : exponent == 0 ? std::ldexp(float(mantissa), -9)
                                          : std::ldexp(float(8 + mantissa), exponent - 10);
  return bits & 0x80 ? -magnitude : magnitude;
}

/// Rounds to nearest even, beyond the largest number to that.
inline unsigned char to_e4m3(float value) {
  const unsigned sign = std::signbit(value) ? 0x80 : 0;
  if (std::isnan(value)) return 0x7f;
  const float magnitude = std::fmin(std::fabs(value), 448.0f);
  const int exponent = std::max(magnitude > 0 ? std::ilogb(magnitude) : -6, -6);
  const int units = int(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));
  return static_cast<unsigned char>(sign | unsigned(units + 8 * (exponent + 6)));
}

}  // namespace emulator
