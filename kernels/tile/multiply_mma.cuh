// Slices of matrix products of swizzled tiles by mma.sync: 16 deep, one ldmatrix for two pieces.
// Main loops write them alternately with other arithmetic, which fills their latencies.
#pragma once

#include "arch/mma_sync.cuh"
#include "arch/pack.cuh"
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

/// Which columns of a left operand, 16 * steps of them, hold something else than 0 in some row of
/// the warp. The others are not to be multiplied by what the right operand has there: 0 * NaN.
template <int steps>
class UsedColumns {
 public:
  /// Of one 16-column step; to be called for every step.
  template <int m_tiles>
  __device__ void see(const unsigned (&left)[m_tiles][4], int step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      unsigned pair = 0;
#pragma unroll
      for (int i = 0; i < m_tiles; ++i) pair |= left[i][2 * half] | left[i][2 * half + 1];
      const unsigned used = unsigned((pair & 0x7fffu) != 0) | unsigned((pair & 0x7fff0000u) != 0)
                                                                  << 1;
      bits_[step / 8] |= used << (step % 8 * 4 + half * 2);
    }
  }

  /// Of all rows of the warp; to be called once.
  __device__ void share() {
#pragma unroll
    for (int word = 0; word < words; ++word) {
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) {
        bits_[word] |= __shfl_xor_sync(0xffffffffu, bits_[word], lanes);
      }
    }
  }

  /// What is to be taken of the right operand's pair in rows of this half of a step.
  __device__ unsigned mask(int step, int half) const {
    const unsigned used = bits_[step / 8] >> (step % 8 * 4 + half * 2);
    return (used & 1) * 0xffffu | (used >> 1 & 1) * 0xffff0000u;
  }

 private:
  static constexpr int words = (steps + 7) / 8;
  unsigned bits_[words] = {};
};

/// `accumulate_slice` without the rows of right that meet unused columns of left.
template <DataType dtype, int m_tiles, int n_tiles, class Walk, int steps>
__device__ inline void accumulate_used_slice(MmaFragment<m_tiles, n_tiles>& sums,
                                             const unsigned (&left)[m_tiles][4], const Walk& right,
                                             const UsedColumns<steps>& used, int step, int pair,
                                             int target_pair) {
  unsigned b[4];
  load_matrices_transposed(b, right.at(pair, step * 16));
#pragma unroll
  for (int e = 0; e < 4; ++e) b[e] &= used.mask(step, e % 2);
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

  /// A lane's part of 16 columns of the first 16 rows.
  __device__ const unsigned (&words(int step) const)[4] { return at[step][0]; }

  __device__ unsigned& upper(int i, int j) { return at[j / 2][i][j % 2 * 2]; }
  __device__ unsigned& lower(int i, int j) { return at[j / 2][i][j % 2 * 2 + 1]; }
  __device__ unsigned upper(int i, int j) const { return at[j / 2][i][j % 2 * 2]; }
  __device__ unsigned lower(int i, int j) const { return at[j / 2][i][j % 2 * 2 + 1]; }

  template <DataType dtype>
  __device__ void round(const MmaFragment<m_tiles, n_tiles>& values) {
#pragma unroll
    for (int i = 0; i < m_tiles; ++i) {
#pragma unroll
      for (int j = 0; j < n_tiles; ++j) {
        upper(i, j) = pack_pair<dtype>(values.at[i][j][0], values.at[i][j][1]);
        lower(i, j) = pack_pair<dtype>(values.at[i][j][2], values.at[i][j][3]);
      }
    }
  }
};

}  // namespace cupyflash
