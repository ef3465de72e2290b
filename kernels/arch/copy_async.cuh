// cp.async (sm_80): global to shared memory without passing through registers.
#pragma once

namespace cupyflash {

/// Copies `bytes` (4, 8 or 16), or writes as many zeros and reads nothing if not `inside`.
template <int bytes>
__device__ inline void copy_async(void* shared, const void* global, bool inside) {
  static_assert(bytes == 4 || bytes == 8 || bytes == 16);
  const unsigned destination = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  const int source_bytes = inside ? bytes : 0;
  if constexpr (bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(global),
                 "r"(source_bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(destination), "l"(global),
                 "n"(bytes), "r"(source_bytes)
                 : "memory");
  }
}

/// Waits until this thread's copies have landed; others see them after the next barrier.
__device__ inline void copy_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace cupyflash
