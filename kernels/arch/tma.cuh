// cp.async.bulk.tensor (sm_90): the copy engine moves boxes of arrays to shared memory and back.
#pragma once

#include "arch/mbarrier.cuh"
#include "common/types.cuh"

namespace cupyflash {

/// The driver's description of an array; Python writes it (tensor_map.py).
struct alignas(64) TensorMap {
  unsigned char opaque[128];
};

/// Fetches the description ahead of its first use.
__device__ inline void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// Starts to copy a box of (batch, head, row, col) to `shared`; its bytes count on `arrived`.
/// What lies outside the array, in any direction, becomes 0.
__device__ inline void copy_box(unsigned shared, const TensorMap& map, int col, int row, int head,
                                int batch, AsyncBarrier arrived) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared),
      "l"(&map), "r"(col), "r"(row), "r"(head), "r"(batch), "r"(arrived.address)
      : "memory");
}

/// Starts to copy a box from `shared`, but for what lies outside the array, and ends a group of
/// such copies: see bulk.cuh for how to wait for it.
__device__ inline void store_box(const TensorMap& map, unsigned shared, int col, int row, int head,
                                 int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];\n"
      "cp.async.bulk.commit_group;" ::"l"(&map),
      "r"(col), "r"(row), "r"(head), "r"(batch), "r"(shared)
      : "memory");
}

}  // namespace cupyflash
