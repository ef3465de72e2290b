// Host version of kernels/arch/exponential.cuh.
#pragma once

namespace cupyflash {

inline float exp2_hardware(float x) {
  constexpr float least_normal = 1.1754944e-38f;
  const float result = exp2f(x);
  return result < least_normal ? 0.0f : result;
}

inline float reciprocal_hardware(float x) { return 1.0f / x; }

inline float exp_difference(float score, float shift) {
  constexpr float log2e = 1.4426950408889634f;
  return exp2_hardware((score - shift) * log2e);
}
inline double exp_difference(double score, double shift) { return exp(score - shift); }

}  // namespace cupyflash
