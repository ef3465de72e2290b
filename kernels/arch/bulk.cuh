// cp.async.bulk, cp.reduce.async.bulk (sm_90): the copy engine gets neighbouring bytes, and adds.
#pragma once

#include "arch/mbarrier.cuh"

namespace cupyflash {

/// Starts to copy `bytes`, a multiple of 16, to `shared`; they count on `arrived`.
__device__ inline void copy_bulk(unsigned shared, const void* global, int bytes,
                                 AsyncBarrier arrived) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared),
      "l"(global), "r"(bytes), "r"(arrived.address)
      : "memory");
}

/// Starts global += shared, each number atomically, and ends a group of such additions.
__device__ inline void add_bulk(float* global, unsigned shared, int bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;" ::"l"(global),
      "r"(shared), "r"(bytes)
      : "memory");
}
/// Waits until this thread's copies and additions have read shared memory.
__device__ inline void await_bulk_reads() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
/// Waits until this thread's additions are done, and visible to those who learn of it.
__device__ inline void await_bulk_additions() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/// Lets products and the copy engine see what this thread has written to shared memory; then a
/// barrier.
__device__ inline void publish_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace cupyflash
