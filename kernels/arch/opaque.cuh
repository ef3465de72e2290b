// An empty instruction: what the compiler must not look through.
#pragma once

namespace cupyflash {

/// `value`, of which the compiler knows nothing: what is computed from it is computed where it is
/// written, instead of being kept in registers across a loop that has none to spare.
template <class T>
__device__ inline T opaque(T value) {
  if constexpr (sizeof(T) == 8) {
    asm volatile("" : "+l"(value));
  } else {
    asm volatile("" : "+r"(value));
  }
  return value;
}

}  // namespace cupyflash
