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

/// 0, but the assembler learns so only after all that precedes it: it would start products before
/// an arrival at a barrier, as nothing they need comes from there. The address is read.
__device__ inline unsigned zero_from_here(unsigned address) {
  unsigned word;
  asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word & blockIdx.y;  // grids have one axis
}

}  // namespace cupyflash
