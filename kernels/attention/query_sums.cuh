// In which order dq's float32 sums lie in memory: as the warps that add to them hold them.
#pragma once

#include "common/types.cuh"

namespace cupyflash {

/// (rows / 8, head_dim / 16, 8 rows, 16 columns). Of the 16 columns a lane of mma.sync has two
/// neighbours in each half; its four lie side by side, so that a warp adds to 512 bytes in a row.
template <int head_dim>
struct QuerySums {
  float* sums;
  static constexpr int columns = 16;
  static constexpr int group = 8 * columns;  // distance from 16 columns to the next

  __device__ float* row(int64 index) const {
    return sums + (index & ~int64(7)) * head_dim + (index & 7) * columns;
  }
  /// Distance from a row's column 0 to column `col`.
  __device__ static constexpr int offset(int col) {
    return col / columns * group + col % 8 / 2 * 4 + col % columns / 8 * 2 + col % 2;
  }
};

}  // namespace cupyflash
