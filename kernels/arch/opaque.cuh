// An empty instruction: what the compiler must not look through.
#pragma once

namespace cupyflash {

/// `value`, of which the compiler knows nothing: it is computed here, and what is computed from it
/// where that is written, instead of being kept in registers across a loop that has none to spare.
template <class T>
__device__ inline T opaque(T value) {
  if constexpr (sizeof(T) == 8) {
    asm volatile("" : "+l"(value));
  } else {
    asm volatile("" : "+r"(value));
  }
  return value;
}

/// What `a` and `b` are to hold is computed before this, not wherever it is used.
__device__ inline void settle_both(float (&a)[4], float (&b)[4]) {
  asm volatile(""
               : "+f"(a[0]), "+f"(a[1]), "+f"(a[2]), "+f"(a[3]), "+f"(b[0]), "+f"(b[1]), "+f"(b[2]),
                 "+f"(b[3]));
}

/// Lets go of the registers of a product to come. It only writes them, but its instruction would
/// have their values kept for it until then.
__device__ inline void forget(float (&values)[4]) {
  asm volatile("" : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3]));
}

}  // namespace cupyflash
