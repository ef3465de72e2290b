// How the 32 lanes of a warp share a float32 tile that mma.sync makes: 16 x 8 pieces, of which a
// lane has two neighbouring columns of two rows.
#pragma once

#include "tile/lanes.cuh"

namespace cupyflash {

struct MmaLane {
  __device__ static int lane() { return threadIdx.x & 31; }
  __device__ static int row() { return lane() >> 2; }
  __device__ static int col() { return (lane() & 3) * 2; }
};

/// A warp's tile of 16 * m_tiles rows, 8 * n_tiles columns. Element e of piece (i, j) is row
/// 16 i + 8 (e / 2) + MmaLane::row(), column 8 j + e % 2 + MmaLane::col().
template <int m_tiles_, int n_tiles_>
struct MmaFragment {
  static constexpr int m_tiles = m_tiles_;
  static constexpr int n_tiles = n_tiles_;
  float at[m_tiles][n_tiles][4];

  __device__ void fill(float value) {
#pragma unroll
    for (int i = 0; i < m_tiles; ++i) {
#pragma unroll
      for (int j = 0; j < n_tiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) at[i][j][e] = value;
      }
    }
  }
};

/// Over the four lanes that share a row.
__device__ inline float quad_maximum(float value) {
  value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
  return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
}
__device__ inline float quad_total(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

}  // namespace cupyflash
