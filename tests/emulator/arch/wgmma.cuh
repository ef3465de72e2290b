// Host version of kernels/arch/wgmma.cuh.
#pragma once

#include "arch/wgmma_operand.cuh"
#include "arch/wgmma_registers.cuh"
#include "arch/wgmma_shared.cuh"

namespace cupyflash {

inline void products_see_registers() { emulator::fence_registers(); }
inline void commit_products() { emulator::commit_products(); }

template <int pending>
void await_products() {
  emulator::await_products(pending);
}

template <int count>
void settle(float (&)[count]) {}

}  // namespace cupyflash
