// Products of a warpgroup's 64 rows with tiles in shared memory by wgmma.
#pragma once

#include "arch/pack_float8.cuh"
#include "arch/wgmma.cuh"
#include "tile/multiply_mma.cuh"
#include "tile/panels.cuh"

namespace cupyflash {

/// The compiler must not move reads or writes of the fragment past this.
template <int n_tiles>
__device__ inline void settle(MmaFragment<1, n_tiles>& fragment) {
  settle(reinterpret_cast<float (&)[n_tiles * 4]>(fragment.at));
}

/// Values of a fragment, rounded to e4m3, as left operand: its columns lie where each lane has
/// them, which is the order that transpose_float8 gives the rows of the right one.
template <int n_tiles>
struct Float8Operand {
  unsigned at[n_tiles / 4][4];

  /// A lane's part of 32 columns.
  __device__ const unsigned (&words(int step) const)[4] { return at[step]; }

  template <DataType dtype>
  __device__ void round(const MmaFragment<1, n_tiles>& values) {
#pragma unroll
    for (int j = 0; j < n_tiles; j += 2) {
      const float (&a)[4] = values.at[0][j];
      const float (&b)[4] = values.at[0][j + 1];
      at[j / 4][j % 4] = pack_float8(a[0], a[1], b[0], b[1]);
      at[j / 4][j % 4 + 1] = pack_float8(a[2], a[3], b[2], b[3]);
    }
  }
};

/// Starts scores = left * right^T over 32 * steps bytes of a row, `left` in registers.
template <DataType dtype, int steps, int n_tiles, class Tile>
__device__ inline void multiply_rows(MmaFragment<1, n_tiles>& scores,
                                     const unsigned (&left)[steps][4], const Tile& right) {
  auto& sum = reinterpret_cast<float (&)[n_tiles * 4]>(scores.at);
  const uint64 b = right.operand();
#pragma unroll
  for (int step = 0; step < steps; ++step) {
    RegisterProduct<dtype, n_tiles * 8>::template multiply<false>(
        sum, left[step], advance_operand(b, Tile::column_bytes(step)), step > 0);
  }
}

/// The same with `left` rows first_row ... of a tile. Unless `fresh`, scores += that.
template <DataType dtype, int steps, bool fresh = true, int n_tiles, class Left, class Tile>
__device__ inline void multiply_rows(MmaFragment<1, n_tiles>& scores, const Left& left,
                                     int first_row, const Tile& right) {
  auto& sum = reinterpret_cast<float (&)[n_tiles * 4]>(scores.at);
  const uint64 a = left.operand(first_row), b = right.operand();
#pragma unroll
  for (int step = 0; step < steps; ++step) {
    SharedProduct<dtype, n_tiles * 8>::multiply(sum, advance_operand(a, Left::column_bytes(step)),
                                                advance_operand(b, Tile::column_bytes(step)),
                                                !fresh || step > 0);
  }
}

/// Starts sums = left^T * right over all rows of both: columns 64 * left_panel ... of left, 64 of
/// them, with columns 64 * right_panel ... of right.
template <DataType dtype, int n_tiles, class Left, class Right>
__device__ inline void multiply_columns(MmaFragment<1, n_tiles>& sums, const Left& left,
                                        int left_panel, const Right& right, int right_panel) {
  static_assert(Left::rows == Right::rows);
  auto& sum = reinterpret_cast<float (&)[n_tiles * 4]>(sums.at);
  const uint64 a = left.columns(left_panel), b = right.columns(right_panel);
#pragma unroll
  for (int step = 0; step < Left::rows / 16; ++step) {
    SharedProduct<dtype, n_tiles * 8>::template multiply<true, true>(
        sum, advance_operand(a, Left::row_bytes(step)), advance_operand(b, Right::row_bytes(step)),
        step > 0);
  }
}

/// Starts sums += left * right over rows 16 * first ... of right, 16 * end at most.
template <DataType dtype, int first, int end, int n_tiles, int left_tiles, class Tile>
__device__ inline void accumulate_rows(MmaFragment<1, n_tiles>& sums,
                                       const MmaOperand<1, left_tiles>& left, const Tile& right) {
  auto& sum = reinterpret_cast<float (&)[n_tiles * 4]>(sums.at);
  const uint64 b = right.operand();
#pragma unroll
  for (int step = first; step < end; ++step) {
    RegisterProduct<dtype, n_tiles * 8>::template multiply<true>(
        sum, left.at[step][0], advance_operand(b, Tile::row_bytes(step)), true);
  }
}

/// The same with `left` rows first_row ... of a tile.
template <DataType dtype, int steps, int n_tiles, class Left, class Tile>
__device__ inline void accumulate_rows(MmaFragment<1, n_tiles>& sums, const Left& left,
                                       int first_row, const Tile& right) {
  auto& sum = reinterpret_cast<float (&)[n_tiles * 4]>(sums.at);
  const uint64 a = left.operand(first_row), b = right.operand();
#pragma unroll
  for (int step = 0; step < steps; ++step) {
    SharedProduct<dtype, n_tiles * 8>::template multiply<false, true>(
        sum, advance_operand(a, Left::column_bytes(step)),
        advance_operand(b, Tile::row_bytes(step)), true);
  }
}

/// The same for bytes in registers, with `right` transposed: over its columns 32 * first ...
/// 32 * end - 1. With `fresh` the sums start from 0.
template <bool fresh, int first, int end, int n_tiles, int left_tiles, class Tile>
__device__ inline void accumulate_rows(MmaFragment<1, n_tiles>& sums,
                                       const Float8Operand<left_tiles>& left, const Tile& right) {
  auto& sum = reinterpret_cast<float (&)[n_tiles * 4]>(sums.at);
  const uint64 b = right.operand();
#pragma unroll
  for (int step = first; step < end; ++step) {
    RegisterProduct<DataType::float8_e4m3fn, n_tiles * 8>::template multiply<false>(
        sum, left.at[step], advance_operand(b, Tile::column_bytes(step)), !fresh || step > 0);
  }
}

}  // namespace cupyflash
