// Tiles of 16-bit elements in shared memory, laid out for ldmatrix.
#pragma once

#include "arch/shared_memory.cuh"
#include "common/types.cuh"

namespace cupyflash {

/// `rows` x `cols`, row-major, the 16-byte chunks of a row permuted by an exclusive or with its
/// number: the same columns of eight consecutive rows lie in eight different groups of four banks.
///
/// Rows of a multiple of 128 bytes take turns in all eight groups; others (64 bytes more) start in
/// turn at bank 0 and 16, so that two bits of permutation every other row do.
template <int rows_, int cols_>
struct SwizzledTile {
  static constexpr int rows = rows_;
  static constexpr int cols = cols_;
  static constexpr int pitch = cols * 2;  // bytes from row to row
  static constexpr int chunks = cols / 8;
  static constexpr int bytes = rows * pitch;
  static constexpr bool whole = cols % 64 == 0;
  static constexpr int period = whole ? 8 : 4;  // chunks that are permuted among themselves
  static_assert(cols % 32 == 0 && rows % 8 == 0);

  unsigned address;  // of the first byte, a multiple of 128

  __device__ static constexpr int permutation(int row) { return whole ? row & 7 : row >> 1 & 3; }

  __device__ unsigned chunk(int row, int index) const {
    return address + row * pitch + ((index ^ permutation(row)) << 4);
  }
  /// Address of a pair of elements; col is even.
  __device__ unsigned pair(int row, int col) const { return chunk(row, col >> 3) + (col & 7) * 2; }
};

}  // namespace cupyflash
