// The predicate: scores of pairs that do not see each other become -inf. And which probabilities
// dropout keeps. Scores may be transposed: rows are keys then, columns queries.
#pragma once

#include "attention/dropout.cuh"
#include "attention/element_mask.cuh"
#include "attention/key_range.cuh"
#include "tile/lanes.cuh"

namespace cupyflash {

/// Masks a lane's scores, rows first_row + 4 i, columns first_col + 8 j of the sequence. A band of
/// queries by keys serves scores, a transposed one transposed scores. Rows that do not exist see
/// nothing.
template <class T, int rows, int cols>
__device__ void apply_mask(Fragment<T, rows, cols>& scores, const Band& band, int first_row,
                           int first_col) {
#pragma unroll
  for (int i = 0; i < rows; ++i) {
    const int row = first_row + i * LaneGrid::rows;
    const Range seen = row < band.rows ? band.seen_by(row) : Range{0, 0};
#pragma unroll
    for (int j = 0; j < cols; ++j) {
      if (!seen.contains(first_col + j * LaneGrid::cols)) scores.at[i][j] = -infinity<T>;
    }
  }
}

/// One bit for each of a lane's elements: bit i * cols + j. More than 64 no tile has.
struct LaneBits {
  uint64 bits = 0;

  __device__ bool at(int index) const { return (bits >> index & 1) != 0; }
};

/// The same for what masks hide.
template <bool transposed, auto config, class T, int rows, int cols>
__device__ void apply_element_mask(Fragment<T, rows, cols>& scores, const ElementMask<config>& mask,
                                   int first_row, int first_col) {
  LaneBits seen;
  // A row's loads are under way together; all at once would need more registers than there are.
#pragma unroll 1
  for (int i = 0; i < rows; ++i) {
    const int row = first_row + i * LaneGrid::rows;
    uint64 of_row = 0;
#pragma unroll
    for (int j = 0; j < cols; ++j) {
      const int col = first_col + j * LaneGrid::cols;
      of_row |= uint64(transposed ? mask.sees(col, row) : mask.sees(row, col)) << j;
    }
    seen.bits |= of_row << (i * cols);
  }
#pragma unroll
  for (int i = 0; i < rows; ++i) {
#pragma unroll
    for (int j = 0; j < cols; ++j) {
      if (!seen.at(i * cols + j)) scores.at[i][j] = -infinity<T>;
    }
  }
}

/// Which of a lane's elements dropout keeps. Tiles of an even number of columns start at multiples
/// of 16, so that columns 8 apart share their random words.
template <bool transposed, int rows, int cols, auto config>
__device__ LaneBits kept_elements(const Dropout<config>& dropout, int first_row, int first_col) {
  LaneBits kept;
#pragma unroll 1
  for (int i = 0; i < rows; ++i) {
    const int row = first_row + i * LaneGrid::rows;
    uint64 of_row = 0;
#pragma unroll
    for (int j = 0; j < cols; j += 2 - cols % 2) {
      const int col = first_col + j * LaneGrid::cols;
      if constexpr (cols % 2 == 0) {
        const uint4 four = transposed ? dropout.words(col, row) : dropout.words(row, col);
        const unsigned left = row & 8 ? (transposed ? four.y : four.z) : four.x;
        const unsigned right = row & 8 ? four.w : (transposed ? four.z : four.y);
        of_row |= (uint64(dropout.keeps(left)) | uint64(dropout.keeps(right)) << 1) << j;
      } else {
        of_row |= uint64(transposed ? dropout.keeps(col, row) : dropout.keeps(row, col)) << j;
      }
    }
    kept.bits |= of_row << (i * cols);
  }
  return kept;
}

}  // namespace cupyflash
