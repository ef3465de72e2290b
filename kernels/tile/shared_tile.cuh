// A matrix tile in shared memory.
#pragma once

#include "common/types.cuh"

namespace cupyflash {

/// `rows` x `cols` elements, row-major, `padding` unused elements after each row.
template <class T, int rows_, int cols_, int padding>
struct alignas(16) SharedTile {
  using Value = T;
  static constexpr int rows = rows_;
  static constexpr int cols = cols_;
  static constexpr int stride = cols + padding;
  static_assert(stride * sizeof(T) % 16 == 0, "rows must start at multiples of 16 bytes");

  T data[rows * stride];

  __device__ T* row(int index) { return data + index * stride; }
  __device__ const T* row(int index) const { return data + index * stride; }
};

/// Rows of q, k, v or their gradients. 16 bytes of padding put the same columns of eight
/// consecutive rows into eight different groups of four banks.
template <class T, int rows, int cols>
using OperandTile = SharedTile<T, rows, cols, widest<T>>;

/// Scores or probabilities. Padding by 8 lets 4 x 8 lanes write elements without a bank conflict
/// and 4 rows be read by vectors without one.
template <class T, int rows, int cols>
using ScoreTile = SharedTile<T, rows, cols, 8>;

}  // namespace cupyflash
