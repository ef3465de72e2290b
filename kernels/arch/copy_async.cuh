// cp.async (sm_80): global to shared memory without passing through registers.
#pragma once

namespace cupyflash {

/// Copies `bytes` (4, 8 or 16), or writes as many zeros and reads nothing if not `inside`.
template <int bytes>
__device__ inline void copy_async_to(unsigned shared, const void* global, bool inside) {
  const int source_bytes = inside ? bytes : 0;
  if constexpr (bytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared),
                 "l"(global), "r"(source_bytes)
                 : "memory");
  } else {
    static_assert(bytes == 4 || bytes == 8);
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global),
                 "n"(bytes), "r"(source_bytes)
                 : "memory");
  }
}

/// The same by generic address.
template <int bytes>
__device__ inline void copy_async(void* shared, const void* global, bool inside) {
  copy_async_to<bytes>(static_cast<unsigned>(__cvta_generic_to_shared(shared)), global, inside);
}

/// Ends a group of this thread's copies.
__device__ inline void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most `pending` of this thread's groups are still under way.
template <int pending>
__device__ inline void copy_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

/// Waits until all of this thread's copies have landed, committed or not; others see them after the
/// next barrier.
__device__ inline void copy_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace cupyflash
