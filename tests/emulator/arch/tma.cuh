// Host version of kernels/arch/tma.cuh.
#pragma once

#include "arch/mbarrier.cuh"
#include "common/types.cuh"
#include "copies.h"

namespace cupyflash {

struct alignas(64) TensorMap {
  unsigned char opaque[128];
};

inline void prefetch_map(const TensorMap&) {}

inline void copy_box(unsigned shared, const TensorMap& map, int col, int row, int head, int batch,
                     AsyncBarrier arrived) {
  const int at[] = {col, row, head, batch};
  emulator::copy_box_later(shared, &map, at, 4, arrived.address);
}

inline void store_box(const TensorMap& map, unsigned shared, int col, int row, int head,
                      int batch) {
  const int at[] = {col, row, head, batch};
  emulator::store_box_later(&map, shared, at, 4);
  emulator::commit_bulk();
}

}  // namespace cupyflash
