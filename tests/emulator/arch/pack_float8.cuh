// Host version of kernels/arch/pack_float8.cuh.
#pragma once

#include "formats.h"

namespace cupyflash {

inline unsigned pack_float8(float a, float b, float c, float d) {
  unsigned bytes = 0;
  for (const float value : {d, c, b, a}) bytes = bytes << 8 | emulator::to_e4m3(value);
  return bytes;
}

}  // namespace cupyflash
