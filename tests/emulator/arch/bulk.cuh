// Host version of kernels/arch/bulk.cuh.
#pragma once

#include "arch/mbarrier.cuh"
#include "copies.h"

namespace cupyflash {

inline void copy_bulk(unsigned shared, const void* global, int bytes, AsyncBarrier arrived) {
  emulator::copy_bulk_later(shared, global, bytes, arrived.address);
}

inline void add_bulk(float* global, unsigned shared, int bytes) {
  emulator::add_bulk_later(global, shared, bytes);
  emulator::commit_bulk();
}
inline void await_bulk_reads() { emulator::await_bulk_read(0); }
inline void await_bulk_additions() { emulator::await_bulk(0); }

inline void publish_shared() { emulator::fence_proxies(); }

}  // namespace cupyflash
