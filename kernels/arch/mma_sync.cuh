// mma.sync (sm_80): the product of two small matrices by one warp on the tensor cores.
#pragma once

#include "common/types.cuh"

namespace cupyflash {

/// sum (16 x 8, float32) += a (16 x 16) * b (16 x 8).
///
/// With row = lane / 4 and col = lane % 4 * 2, the lane holds
///   sum: (row, col), (row, col + 1), (row + 8, col), (row + 8, col + 1);
///   a: pairs from (row, col), (row + 8, col), (row, col + 8), (row + 8, col + 8);
///   b: pairs down the column `row` of b, from its rows col and col + 8.
template <DataType dtype>
__device__ inline void mma_16x8x16(float (&sum)[4], const unsigned (&a)[4], unsigned b_low,
                                   unsigned b_high) {
  if constexpr (dtype == DataType::bfloat16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(b_high));
  } else {
    static_assert(dtype == DataType::float16);
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(b_high));
  }
}

}  // namespace cupyflash
