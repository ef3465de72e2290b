// The predicate on fragments of mma.sync, and the scores that are more than a product.
#pragma once

#include "attention/key_range.cuh"
#include "attention/score.cuh"
#include "tile/fragment_mma.cuh"

namespace cupyflash {

/// Masks a warp's scores of rows first_row ..., columns first_col ... of the sequence. A band of
/// queries by keys serves scores, a transposed one transposed scores. Rows that do not exist see
/// nothing.
template <int m_tiles, int n_tiles>
__device__ void apply_mask(MmaFragment<m_tiles, n_tiles>& scores, const Band& band, int first_row,
                           int first_col) {
#pragma unroll
  for (int i = 0; i < m_tiles; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + i * 16 + r * 8 + MmaLane::row();
      const Range seen = band.seen_by(row);
      const int begin = seen.begin - first_col - MmaLane::col();
      const int end = row < band.rows ? seen.end - first_col - MmaLane::col() : begin;
#pragma unroll
      for (int j = 0; j < n_tiles; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (j * 8 + c < begin || j * 8 + c >= end) {
            scores.at[i][j][2 * r + c] = -infinity<float>;
          }
        }
      }
    }
  }
}

}  // namespace cupyflash
