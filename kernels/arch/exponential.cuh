// ex2: 2**x by the special function unit.
#pragma once

namespace cupyflash {

/// 2**x within 2 units in the last place, exact for x = 0; 0 for -inf and below the normal range.
__device__ inline float exp2_hardware(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace cupyflash
