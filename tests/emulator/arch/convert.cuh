// Host version of kernels/arch/convert.cuh.
#pragma once

#include "common/float8.cuh"
#include "common/types.cuh"

namespace cupyflash {

inline float to_accumulator(float value) { return value; }
inline double to_accumulator(double value) { return value; }
inline float to_accumulator(Float16 value) { return emulator::from_half(value.bits); }
inline float to_accumulator(BFloat16 value) { return emulator::from_bfloat16(value.bits); }

template <class Element, class T>
Element from_accumulator(T value) {
  if constexpr (__is_same(Element, Float16)) {
    return {emulator::to_half(float(value))};
  } else if constexpr (__is_same(Element, BFloat16)) {
    return {emulator::to_bfloat16(float(value))};
  } else if constexpr (__is_same(Element, Float8E4M3)) {
    return to_float8(float(value));
  } else {
    return Element(value);
  }
}

}  // namespace cupyflash
