// Host version of kernels/arch/opaque.cuh: registers are no concern here.
#pragma once

namespace cupyflash {

template <class T>
T opaque(T value) {
  return value;
}

inline void settle_both(float (&)[4], float (&)[4]) {}

/// Whoever reads them sees it.
inline void forget(float (&values)[4]) {
  for (float& value : values) value = __builtin_nanf("");
}

}  // namespace cupyflash
