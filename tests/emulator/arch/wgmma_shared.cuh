// Host version of kernels/arch/wgmma_shared.cuh, for every width.
#pragma once

#include "arch/wgmma_registers.cuh"

namespace cupyflash {

template <DataType dtype, int n>
struct SharedProduct {
  template <bool a_by_rows = false, bool b_by_rows = false>
  static void multiply(float (&sum)[n / 2], uint64 a, uint64 b, bool accumulate) {
    emulator::start_product({.format = wgmma_format<dtype>,
                             .n = n,
                             .a = a,
                             .b = b,
                             .a_transposed = a_by_rows,
                             .b_transposed = b_by_rows,
                             .accumulate = accumulate},
                            sum, nullptr);
  }
};

}  // namespace cupyflash
