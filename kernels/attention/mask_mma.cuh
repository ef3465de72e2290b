// The predicate on fragments of mma.sync.
#pragma once

#include "attention/element_mask.cuh"
#include "attention/key_range.cuh"
#include "attention/mask_words.cuh"
#include "tile/fragment_mma.cuh"

namespace cupyflash {

/// Masks a warp's scores of rows first_row ..., columns first_col ... of the sequence. A band of
/// queries by keys serves scores, a transposed one transposed scores. Rows that do not exist see
/// nothing. Without a `left_edge` no row's first column is right of first_col, which saves half of
/// the comparisons.
template <bool left_edge = true, int m_tiles, int n_tiles>
__device__ void apply_mask(MmaFragment<m_tiles, n_tiles>& scores, const Band& band, int first_row,
                           int first_col) {
#pragma unroll
  for (int i = 0; i < m_tiles; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + i * 16 + r * 8 + MmaLane::row();
      const Range seen = band.seen_by(row);
      const int begin = seen.begin - first_col - MmaLane::col();
      const int end = row < band.rows ? seen.end - first_col - MmaLane::col() : 0;
#pragma unroll
      for (int j = 0; j < n_tiles; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if ((left_edge && j * 8 + c < begin) || j * 8 + c >= end) {
            scores.at[i][j][2 * r + c] = -infinity<float>;
          }
        }
      }
    }
  }
}

/// The same by element masks. Rows are queries, or keys where `transposed`.
template <bool transposed, auto config, int m_tiles, int n_tiles>
__device__ void hide_unseen(MmaFragment<m_tiles, n_tiles>& scores, const ElementMask<config>& mask,
                            int first_row, int first_col) {
  constexpr int cols = 2 * n_tiles;  // of a lane
  static_assert(2 * m_tiles * cols <= 64);
  using Words = MaskWords<transposed ? 16 * m_tiles : 8 * n_tiles>;
  if constexpr (config.masks == 1 && !config.block_mask && Words::possible) {
    const Words words = {mask.masks[0], transposed ? first_row : first_col};
    if (words.readable()) {
      hide_by_words<transposed>(scores, words, transposed ? first_col : first_row);
      return;
    }
  }
  uint64 seen = 0;
  // A row at a time: the loads of one are under way together, and the code stays short.
#pragma unroll 1
  for (int r = 0; r < 2 * m_tiles; ++r) {
    const int row = first_row + r * 8 + MmaLane::row();
    unsigned bits = 0;
#pragma unroll
    for (int c = 0; c < cols; ++c) {
      const int col = first_col + c / 2 * 8 + c % 2 + MmaLane::col();
      const bool visible = transposed ? mask.sees(col, row) : mask.sees(row, col);
      bits |= unsigned(visible) << c;
    }
    seen |= uint64(bits) << (r * cols);
  }
#pragma unroll
  for (int i = 0; i < m_tiles; ++i) {
#pragma unroll
    for (int j = 0; j < n_tiles; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int bit = (2 * i + e / 2) * cols + 2 * j + e % 2;
        if ((seen >> bit & 1) == 0) scores.at[i][j][e] = -infinity<float>;
      }
    }
  }
}

}  // namespace cupyflash
