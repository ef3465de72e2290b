// cvt to e4m3 (sm_89): four float32 to four bytes of one register.
#pragma once

namespace cupyflash {

/// `a` comes first in memory; rounds to nearest even, and to the largest number what is beyond it.
__device__ inline unsigned pack_float8(float a, float b, float c, float d) {
  unsigned bytes;
  asm("{.reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; "
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; mov.b32 %0, {low, high};}"
      : "=r"(bytes)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return bytes;
}

}  // namespace cupyflash
