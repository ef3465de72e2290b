// Host version of kernels/arch/copy_async.cuh: copies land as late as they may.
#pragma once

#include "copies.h"

namespace cupyflash {

template <int bytes>
void copy_async_to(unsigned shared, const void* global, bool inside) {
  emulator::copy_later(shared, global, bytes, inside);
}

template <int bytes>
void copy_async(void* shared, const void* global, bool inside) {
  copy_async_to<bytes>(emulator::address_of_shared(shared), global, inside);
}

inline void copy_async_commit() { emulator::commit_copies(); }

template <int pending>
void copy_async_wait_group() {
  emulator::await_copies(pending);
}

inline void copy_async_wait() {
  emulator::commit_copies();
  emulator::await_copies(0);
}

}  // namespace cupyflash
