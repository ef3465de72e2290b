// Matrix products of shared-memory tiles on the ordinary multiply-add units.
//
// Both read 16 bytes at a time and need (rows + cols) such reads for rows * cols * width
// multiply-adds of a lane: 16 for 256 with 8 x 8 float32. Operands stay row-major as they are in
// global memory, so nothing is ever transposed.
#pragma once

#include "tile/lanes.cuh"
#include "tile/shared_tile.cuh"

namespace cupyflash {

template <class T>
__device__ inline Vector<T, widest<T>> read_vector(const T* address) {
  return *reinterpret_cast<const Vector<T, widest<T>>*>(address);
}

/// scores = left * right^T: dot products of rows.
///
/// The lane's scores are rows first_row + 4 i of `left` and rows LaneGrid::col() + 8 j of `right`.
template <class T, int rows, int cols, class Left, class Right>
__device__ void multiply_rows(Fragment<T, rows, cols>& scores, const Left& left, int first_row,
                              const Right& right) {
  constexpr int width = widest<T>;
  static_assert(Left::cols == Right::cols && Right::rows == cols * LaneGrid::cols);
  const T* left_row = left.row(first_row);
  const T* right_row = right.row(LaneGrid::col());

  scores.fill(T(0));
#pragma unroll 2
  for (int k = 0; k < Left::cols; k += width) {
    Vector<T, width> b[cols];
#pragma unroll
    for (int j = 0; j < cols; ++j) {
      b[j] = read_vector(right_row + j * LaneGrid::cols * Right::stride + k);
    }
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      const Vector<T, width> a = read_vector(left_row + i * LaneGrid::rows * Left::stride + k);
#pragma unroll
      for (int v = 0; v < width; ++v) {
#pragma unroll
        for (int j = 0; j < cols; ++j) {
          scores.at[i][j] = multiply_add(a[v], b[j][v], scores.at[i][j]);
        }
      }
    }
  }
}

/// Sets vectors of `right` to 0 where the lane's rows of `left`, `stride` apart times
/// LaneGrid::rows, are all 0: 0 * NaN would be NaN.
template <int rows, class T, int width, int groups>
__device__ void clear_unused(Vector<T, width> (&right)[width][groups], const T* left, int stride) {
  bool used[width] = {};
#pragma unroll
  for (int i = 0; i < rows; ++i) {
    const Vector<T, width> a = read_vector(left + i * LaneGrid::rows * stride);
#pragma unroll
    for (int v = 0; v < width; ++v) used[v] = used[v] || a[v] != T(0);
  }
#pragma unroll
  for (int v = 0; v < width; ++v) {
#pragma unroll
    for (int g = 0; g < groups; ++g) {
#pragma unroll
      for (int c = 0; c < width; ++c) right[v][g][c] = used[v] ? right[v][g][c] : T(0);
    }
  }
}

/// Whether a column of the fragment, or a part of it that one lane has, is all 0: the same answer
/// in all lanes of the warp.
template <class T, int rows, int cols>
__device__ bool has_unused(const Fragment<T, rows, cols>& left) {
  bool unused = false;
#pragma unroll
  for (int j = 0; j < cols; ++j) {
    bool used = false;
#pragma unroll
    for (int i = 0; i < rows; ++i) used = used || left.at[i][j] != T(0);
    unused = unused || !used;
  }
  return __any_sync(0xffffffffu, unused);
}

/// Columns [first_group, first_group + groups) of accumulate_product.
template <bool skips, int first_group, int groups, class T, int rows, int cols, class Left,
          class Right>
__device__ void accumulate_groups(Fragment<T, rows, cols>& sums, const T (&scale)[rows],
                                  const Left& left, int first_row, const Right& right,
                                  bool unused) {
  constexpr int width = widest<T>;
  constexpr int group_stride = LaneGrid::cols * width;
  const T* left_row = left.row(first_row);
  const T* right_col = right.row(0) + first_group * group_stride + LaneGrid::col() * width;

  Fragment<T, rows, groups * width> product;
  product.fill(T(0));
#pragma unroll 2
  for (int n = 0; n < Right::rows; n += width) {
    Vector<T, width> b[width][groups];
#pragma unroll
    for (int v = 0; v < width; ++v) {
#pragma unroll
      for (int g = 0; g < groups; ++g) {
        b[v][g] = read_vector(right_col + (n + v) * Right::stride + g * group_stride);
      }
    }
    if constexpr (skips) {
      if (unused) clear_unused<rows>(b, left_row + n, Left::stride);
    }
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      const Vector<T, width> a = read_vector(left_row + i * LaneGrid::rows * Left::stride + n);
#pragma unroll
      for (int v = 0; v < width; ++v) {
#pragma unroll
        for (int c = 0; c < groups * width; ++c) {
          product.at[i][c] = multiply_add(a[v], b[v][c / width][c % width], product.at[i][c]);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < rows; ++i) {
#pragma unroll
    for (int c = 0; c < groups * width; ++c) {
      T& sum = sums.at[i][first_group * width + c];
      sum = multiply_add(sum, scale[i], product.at[i][c]);
    }
  }
}

template <bool skips, int first_group, int group_limit, class T, int rows, int cols, class Left,
          class Right>
__device__ void accumulate_from(Fragment<T, rows, cols>& sums, const T (&scale)[rows],
                                const Left& left, int first_row, const Right& right, bool unused) {
  constexpr int remaining = cols / widest<T> - first_group;
  if constexpr (remaining > 0) {
    constexpr int groups = remaining < group_limit ? remaining : group_limit;
    accumulate_groups<skips, first_group, groups>(sums, scale, left, first_row, right, unused);
    accumulate_from<skips, first_group + groups, group_limit>(sums, scale, left, first_row, right,
                                                              unused);
  }
}

/// sums = sums * scale + left * right, `scale` being one factor a row.
///
/// The lane's sums are rows first_row + 4 i, and columns in vectors: element c of a row is column
/// c / width * 8 * width + LaneGrid::col() * width + c % width. The product of one tile is summed
/// on its own before it joins `sums`: the rounding error then grows with the number of tiles
/// instead of the number of keys, and the rescaling costs no instruction of its own.
/// `working_registers` bounds what that product and the vectors of `right` take, column groups
/// being taken in turn. With `skips`, a row of `right` may hold NaN where all rows of `left` that
/// the lane has are 0, which `unused` says may be.
template <int working_registers, bool skips = false, class T, int rows, int cols, class Left,
          class Right>
__device__ void accumulate_product(Fragment<T, rows, cols>& sums, const T (&scale)[rows],
                                   const Left& left, int first_row, const Right& right,
                                   bool unused = true) {
  constexpr int width = widest<T>;
  constexpr int group_registers = (rows + width) * width * int(sizeof(T) / 4);
  constexpr int group_limit =
      working_registers > group_registers ? working_registers / group_registers : 1;
  static_assert(Left::cols == Right::rows && Right::cols == cols * LaneGrid::cols);
  static_assert(cols % widest<T> == 0 && Right::rows % widest<T> == 0);
  accumulate_from<skips, 0, group_limit>(sums, scale, left, first_row, right, unused);
}

}  // namespace cupyflash
