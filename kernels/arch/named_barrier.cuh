// bar (sm_80): the sixteen barriers of a thread block by number; __syncthreads is number 0.
#pragma once

namespace cupyflash {

/// Arrives and waits until `threads` have arrived.
template <int threads>
__device__ inline void await_barrier(int number) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(threads) : "memory");
}

/// Arrives without waiting.
template <int threads>
__device__ inline void arrive_at_barrier(int number) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "n"(threads) : "memory");
}

}  // namespace cupyflash
