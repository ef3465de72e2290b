// wgmma (sm_90a): products by a warpgroup, which go on while its threads do other things.
#pragma once

#include "arch/wgmma_registers.cuh"
#include "arch/wgmma_shared.cuh"

namespace cupyflash {

/// Describes an operand of rows of 128 bytes, permuted as by SwizzledTile of 64 columns, at
/// `address`. `panel_bytes` is the distance to the columns after these 64; operands by columns
/// never come to them.
__device__ inline uint64 describe_operand(unsigned address, int panel_bytes) {
  constexpr uint64 swizzle_128_bytes = uint64(1) << 62;
  constexpr uint64 eight_rows = uint64(1024 >> 4) << 32;
  return swizzle_128_bytes | eight_rows | uint64(panel_bytes >> 4) << 16 |
         uint64((address & 0x3ffff) >> 4);
}
/// The same operand `bytes` further on.
__device__ inline uint64 advance_operand(uint64 operand, int bytes) {
  return operand + uint64(bytes >> 4);
}

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
