// setmaxnreg (sm_90a): warpgroups give registers to each other.
#pragma once

namespace cupyflash {

/// All warps of a warpgroup: keeps `count` registers a thread and frees the others.
template <int count>
__device__ inline void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

/// All warps of a warpgroup: waits until it has `count` registers a thread.
template <int count>
__device__ inline void claim_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

}  // namespace cupyflash
