// Which keys a tile of queries sees, and where masking is needed; and, transposed, which queries
// see a tile of keys. Causal masks, windows and sequence ends are all one band.
#pragma once

#include "attention/sequence.cuh"

namespace cupyflash {

/// Row r sees column c if lower <= c - r <= upper and 0 <= c < cols.
struct Band {
  int lower;
  int upper;
  int rows;
  int cols;

  /// The same band with queries and keys exchanged.
  __device__ Band transposed() const { return {-upper, -lower, cols, rows}; }

  /// Columns that row `row` sees.
  __device__ Range seen_by(int row) const {
    return {maximum(0, row + lower), minimum(cols, row + upper + 1)};
  }

  /// Columns that at least one of the rows sees.
  __device__ Range seen_by_any(Range given) const {
    const Range existing = {given.begin, minimum(given.end, rows)};
    if (existing.begin >= existing.end) return {0, 0};
    return {maximum(0, existing.begin + lower), minimum(cols, existing.end + upper)};
  }

  /// Columns that all of the rows see: no masking is needed there.
  __device__ Range seen_by_all(Range given) const {
    const Range existing = {given.begin, minimum(given.end, rows)};
    return {maximum(0, existing.end - 1 + lower), minimum(cols, existing.begin + upper + 1)};
  }

  /// The same where a row that does not exist must be masked too, or its scores, which no bias
  /// hides, would say that a key is seen.
  __device__ Range seen_by_existing(Range given) const {
    return given.end > rows ? Range{0, 0} : seen_by_all(given);
  }
};

/// Queries are rows, keys columns. Bounds are cut so that adding an index cannot overflow.
template <bool window>
__device__ Band visible_band(const Attention& attention, const Sequence& sequence) {
  constexpr int open = (1 << 30) - 1;
  Band band = {-open, open, sequence.seqlen_q, sequence.seqlen_k};
  if constexpr (window) {
    const int64 diagonal = sequence.diagonal(attention);
    const int64 lower = diagonal - attention.window_left;
    const int64 upper = diagonal + attention.window_right;
    if (lower > band.lower) band.lower = int(lower);
    if (upper < band.upper) band.upper = int(upper);
  }
  return band;
}

/// Tiles of `block` columns that meet `columns`, as a half-open interval of tile numbers.
__device__ inline Range tiles_of(Range columns, int block) {
  if (columns.begin >= columns.end) return {0, 0};
  return {columns.begin / block, ceil_div(columns.end, block)};
}

}  // namespace cupyflash
