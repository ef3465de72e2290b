// wgmma (sm_90a): products by a warpgroup, which go on while its threads do other things.
#pragma once

#include "arch/wgmma_float8.cuh"
#include "arch/wgmma_operand.cuh"
#include "arch/wgmma_registers.cuh"
#include "arch/wgmma_shared.cuh"

namespace cupyflash {

/// Before products that read registers which were written since the last ones.
__device__ inline void products_see_registers() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
/// Ends a group of products.
__device__ inline void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until at most `pending` groups are still under way, the oldest ones first.
template <int pending>
__device__ inline void await_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

/// What products have written is read after this, and what they are to read is written before it:
/// the compiler does not know when they read and write.
template <int count>
__device__ inline void settle(float (&values)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

}  // namespace cupyflash
