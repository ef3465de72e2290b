// Slices of matrix products of swizzled tiles by mma.sync: 16 deep, one ldmatrix for two pieces.
// Main loops write them alternately with other arithmetic, which fills their latencies.
#pragma once

#include "arch/mma_sync.cuh"
#include "tile/fragment_mma.cuh"
#include "tile/operand_mma.cuh"

namespace cupyflash {

/// scores += left * right^T over 16 columns, `left` as operand `a`.
template <DataType dtype, int m_tiles, int n_tiles, class Walk>
__device__ inline void multiply_slice(MmaFragment<m_tiles, n_tiles>& scores,
                                      const unsigned (&left)[m_tiles][4], const Walk& right,
                                      int step) {
#pragma unroll
  for (int j = 0; j < n_tiles; j += 2) {
    unsigned b[4];
    load_matrices(b, right.at(step, j * 8));
#pragma unroll
    for (int i = 0; i < m_tiles; ++i) {
      mma_16x8x16<dtype>(scores.at[i][j], left[i], b[0], b[1]);
      mma_16x8x16<dtype>(scores.at[i][j + 1], left[i], b[2], b[3]);
    }
  }
}

/// Two column pieces of sums += left * right over rows 16 * step ... of right.
template <DataType dtype, int m_tiles, int n_tiles, class Walk>
__device__ inline void accumulate_slice(MmaFragment<m_tiles, n_tiles>& sums,
                                        const unsigned (&left)[m_tiles][4], const Walk& right,
                                        int step, int pair, int target_pair) {
  unsigned b[4];
  load_matrices_transposed(b, right.at(pair, step * 16));
#pragma unroll
  for (int i = 0; i < m_tiles; ++i) {
    mma_16x8x16<dtype>(sums.at[i][2 * target_pair], left[i], b[0], b[1]);
    mma_16x8x16<dtype>(sums.at[i][2 * target_pair + 1], left[i], b[2], b[3]);
  }
}

/// 16-bit values of a fragment, rounded, as operand `a` of the next product.
template <int m_tiles, int n_tiles>
struct MmaOperand {
  unsigned at[n_tiles / 2][m_tiles][4];

  __device__ unsigned& upper(int i, int j) { return at[j / 2][i][j % 2 * 2]; }
  __device__ unsigned& lower(int i, int j) { return at[j / 2][i][j % 2 * 2 + 1]; }
  __device__ unsigned upper(int i, int j) const { return at[j / 2][i][j % 2 * 2]; }
  __device__ unsigned lower(int i, int j) const { return at[j / 2][i][j % 2 * 2 + 1]; }
};

}  // namespace cupyflash
