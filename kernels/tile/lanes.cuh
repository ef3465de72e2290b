// How the 32 lanes of a warp share a tile: 4 rows by 8 columns.
#pragma once

#include "common/math.cuh"

namespace cupyflash {

/// Lane bits 1 and 4 select the row, bits 0, 2 and 3 the column.
///
/// A 128-bit shared-memory read is served half a warp at a time, in one cycle a half where lanes
/// that differ in bit 0 (or all that differ in bit 1) ask for the same 16 bytes. With this order a
/// read by row and a read by column both qualify: two cycles each instead of four.
struct LaneGrid {
  static constexpr int rows = 4;
  static constexpr int cols = 8;

  __device__ static int lane() { return threadIdx.x & 31; }
  __device__ static int row() { return ((lane() >> 1) & 1) | ((lane() >> 3) & 2); }
  __device__ static int col() { return (lane() & 1) | ((lane() >> 1) & 6); }
};

/// Number of this warp in its block, in a form that the compiler knows to be the same in all lanes:
/// what depends on it alone then costs neither registers of each lane nor divergent branches.
__device__ inline int warp_index() { return __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0); }

/// The lane's part of a register tile: rows LaneGrid::rows apart. Columns are either LaneGrid::cols
/// apart (scores) or come in vectors (sums along head_dim): see multiply_simt.
template <class T, int rows, int cols>
struct Fragment {
  T at[rows][cols];

  __device__ void fill(T value) {
#pragma unroll
    for (int i = 0; i < rows; ++i) {
#pragma unroll
      for (int j = 0; j < cols; ++j) at[i][j] = value;
    }
  }
};

/// Maximum over the eight lanes that share a row.
template <class T>
__device__ T row_maximum(T value) {
  value = maximum(value, __shfl_xor_sync(0xffffffffu, value, 1));
  value = maximum(value, __shfl_xor_sync(0xffffffffu, value, 4));
  return maximum(value, __shfl_xor_sync(0xffffffffu, value, 8));
}

/// Sum over the eight lanes that share a row, in an order that does not depend on the lane.
template <class T>
__device__ T row_total(T value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  value += __shfl_xor_sync(0xffffffffu, value, 4);
  return value + __shfl_xor_sync(0xffffffffu, value, 8);
}

}  // namespace cupyflash
