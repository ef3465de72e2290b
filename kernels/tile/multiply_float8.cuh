// Slices of products whose right operand is e4m3 in shared memory, and 16-bit on its way to
// mma.sync. Its tile is one of half as many 16-bit columns, so that ldmatrix gives each lane four
// neighbouring bytes where it gives two elements else. Both products put up with that order:
//
//   S = Q K^T   a lane has columns 4 c ... 4 c + 3 of K, c = lane % 4, in place of 2 c, 2 c + 1,
//               2 c + 8, 2 c + 9: Q is read in the same order
//   O += P V    transposed, a lane has columns 2 r and 2 r + 1 of two keys, r = lane / 4: one piece
//               gets the even columns of 16, the next one the odd ones
#pragma once

#include "arch/unpack_float8.cuh"
#include "tile/multiply_mma.cuh"

namespace cupyflash {

/// The left operand, 16-bit, in the order of such keys.
template <class Tile>
struct Float8Order {
  /// Where the lane's four columns of the first 16 stand; the rows are first_row + 0 ... 15.
  __device__ static ColumnWalk<Tile> left(const Tile& tile, int first_row) {
    const int quad = MmaLane::col() * 2;
    return {tile.pair(first_row + MmaLane::row(), quad)};
  }

  /// Operand `a` of 16 columns.
  __device__ static void load(unsigned (&a)[4], const ColumnWalk<Tile>& walk, int step) {
    const uint2 upper = load_shared_words(walk.at(step)),
                lower = load_shared_words(walk.at(step, 8));
    a[0] = upper.x;
    a[1] = lower.x;
    a[2] = upper.y;
    a[3] = lower.y;
  }
};

/// scores += left * right^T over 32 columns, `left` as two operands `a`.
template <DataType dtype, int n_tiles, class Walk>
__device__ inline void multiply_float8_slice(MmaFragment<1, n_tiles>& scores,
                                             const unsigned (&left)[2][4], const Walk& right,
                                             int step) {
#pragma unroll
  for (int j = 0; j < n_tiles; j += 2) {
    unsigned bytes[4];
    load_matrices(bytes, right.at(step, j * 8));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      unsigned low, high;
      unpack_float8<dtype>(bytes[i], low, high);
      mma_16x8x16<dtype>(scores.at[0][j + i / 2], left[i % 2], low, high);
    }
  }
}

/// Four column pieces of sums += left * right over rows 16 * step ... of right: 32 columns, which
/// `float8_column` tells apart.
template <DataType dtype, int n_tiles, class Walk>
__device__ inline void accumulate_float8_slice(MmaFragment<1, n_tiles>& sums,
                                               const unsigned (&left)[4], const Walk& right,
                                               int step, int four) {
  unsigned bytes[4];
  load_matrices_transposed(bytes, right.at(four, step * 16));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    unsigned low[2], high[2];  // of the even columns, of the odd ones
#pragma unroll
    for (int eight = 0; eight < 2; ++eight) {  // keys
      const unsigned columns = __byte_perm(bytes[2 * half + eight], 0, 0x3120);
      unsigned (&pair)[2] = eight == 0 ? low : high;
      unpack_float8<dtype>(columns, pair[0], pair[1]);
    }
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      mma_16x8x16<dtype>(sums.at[0][4 * four + 2 * half + odd], left, low[odd], high[odd]);
    }
  }
}

/// Column of element e of piece j, e < 2, of such sums.
__device__ inline int float8_column(int j, int e) {
  return j / 2 * 16 + (MmaLane::col() + e) * 2 + j % 2;
}

}  // namespace cupyflash
