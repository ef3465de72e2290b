// Host version of kernels/arch/wgmma_registers.cuh, for every width.
#pragma once

#include "common/types.cuh"
#include "products.h"

namespace cupyflash {

template <DataType dtype>
constexpr emulator::Format wgmma_format = is_float8(dtype)              ? emulator::Format::e4m3
                                          : dtype == DataType::bfloat16 ? emulator::Format::bfloat16
                                                                        : emulator::Format::half;

template <DataType dtype, int n>
struct RegisterProduct {
  template <bool b_by_rows>
  static void multiply(float (&sum)[n / 2], const unsigned (&a)[4], uint64 b, bool accumulate) {
    emulator::start_product({.format = wgmma_format<dtype>,
                             .n = n,
                             .b = b,
                             .a_in_registers = true,
                             .b_transposed = b_by_rows,
                             .accumulate = accumulate},
                            sum, a);
  }
};

}  // namespace cupyflash
