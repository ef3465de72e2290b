// ex2, rcp: 2**x and 1 / x by the special function unit, and the softmax's exponential.
#pragma once

namespace cupyflash {

/// 2**x within 2 units in the last place, exact for x = 0; 0 for -inf and below the normal range.
__device__ inline float exp2_hardware(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

/// 1 / x within 1 unit in the last place; 0 for inf.
__device__ inline float reciprocal_hardware(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

/// exp(score - shift). The difference is taken first, in natural units: it is exactly 0 for equal
/// scores however large (a fused `score * log2e - shift * log2e` is not), so exp is exactly 1.
__device__ inline float exp_difference(float score, float shift) {
  constexpr float log2e = 1.4426950408889634f;
  return exp2_hardware((score - shift) * log2e);
}
__device__ inline double exp_difference(double score, double shift) { return exp(score - shift); }

}  // namespace cupyflash
