// Host version of kernels/arch/wgmma_shared.cuh, for every width.
#pragma once

#include "arch/wgmma_registers.cuh"

namespace cupyflash {

template <DataType dtype, int n>
struct SharedProduct {
  static void multiply(float (&sum)[n / 2], uint64 a, uint64 b, bool accumulate) {
    emulator::start_product(
        {.format = wgmma_format<dtype>, .n = n, .a = a, .b = b, .accumulate = accumulate}, sum,
        nullptr);
  }
};

}  // namespace cupyflash
