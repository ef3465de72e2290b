// The predicate: scores of pairs that do not see each other become -inf.
#pragma once

#include "attention/key_range.cuh"
#include "tile/lanes.cuh"

namespace cupyflash {

/// Masks a lane's scores, rows first_row + 4 i, columns first_col + 8 j of the sequence. A band of
/// queries by keys serves scores, a transposed one transposed scores.
template <class T, int rows, int cols>
__device__ void apply_mask(Fragment<T, rows, cols>& scores, const Band& band, int first_row,
                           int first_col) {
#pragma unroll
  for (int i = 0; i < rows; ++i) {
    const Range seen = band.seen_by(first_row + i * LaneGrid::rows);
#pragma unroll
    for (int j = 0; j < cols; ++j) {
      if (!seen.contains(first_col + j * LaneGrid::cols)) scores.at[i][j] = -infinity<T>;
    }
  }
}

}  // namespace cupyflash
