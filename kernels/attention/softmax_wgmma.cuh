// The running softmax statistics of a warp's 16 rows, as in softmax_mma.cuh: the scale is left to
// the exponent, and sums are rescaled seldom.
#pragma once

#include "arch/exponential.cuh"
#include "tile/fragment_mma.cuh"

namespace cupyflash {

/// The maxima of a lane's two rows so far, of even and of odd columns: two chains, half the
/// latency.
struct WgmmaMaxima {
  float at[2][2];

  __device__ explicit WgmmaMaxima(const float (&row_max)[2])
      : at{{row_max[0], -infinity<float>}, {row_max[1], -infinity<float>}} {}

  /// Scores of pieces first ... end - 1 too.
  template <int first, int end, int n_tiles>
  __device__ void include(const MmaFragment<1, n_tiles>& scores) {
#pragma unroll
    for (int j = first; j < end; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        at[e >> 1][e & 1] = fmaxf(at[e >> 1][e & 1], scores.at[0][j][e]);
      }
    }
  }
};

/// P = exp2(score * factor - shift), where the shift follows the maximum only when that has grown
/// by more than `slack`: P is then at most 2**(top + slack), as exact relative to l as ever. For
/// e4m3, which ends at 448, P is scaled so that small ones are normal numbers down to 2**-12.
template <bool is_float8>
struct WgmmaSoftmax {
  static constexpr float top = is_float8 ? 6.0f : 0.0f;  // log2 of P at the maximum, at first
  static constexpr float slack = is_float8 ? 2.0f : 6.0f;
  // As long as no key was seen: any exponent is then 0 or -inf, and P = 0.
  static constexpr float none = -3.4028234663852886e38f;

  float factor;      // from scores to exponents of 2, positive
  float row_max[2];  // of the scores
  float shift[2];    // subtracted from exponents; finite, unless a score is +inf or NaN
  float row_sum[2];  // relative to shift, the lane's part

  __device__ explicit WgmmaSoftmax(float factor) : factor(factor) { reset(); }

  /// To rows that have seen no key.
  __device__ void reset() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row_max[r] = -infinity<float>;
      shift[r] = none;
      row_sum[r] = 0.0f;
    }
  }

  /// m in exponents of 2, or `none`.
  __device__ float exponent(int r) const { return fmaxf(row_max[r] * factor, none); }

  /// Turns scores, whose `maxima` are known, into probabilities. If true, alike in all lanes,
  /// earlier sums are to be multiplied by `correction`.
  template <int n_tiles>
  __device__ bool update(MmaFragment<1, n_tiles>& scores, const WgmmaMaxima& maxima,
                         float (&correction)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row_max[r] = quad_maximum(fmaxf(maxima.at[r][0], maxima.at[r][1]));
    }
    const bool follows = follow(correction);
#pragma unroll
    for (int j = 0; j < n_tiles; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& score = scores.at[0][j][e];
        score = exp2_hardware(fmaf(score, factor, -shift[e >> 1]));
        row_sum[e >> 1] += score;
      }
    }
    return follows;
  }

 private:
  __device__ bool follow(float (&correction)[2]) {
    const float next[2] = {exponent(0) - top, exponent(1) - top};
    const bool grown = next[0] > shift[0] + slack || next[1] > shift[1] + slack;
    const bool follows = __any_sync(0xffffffffu, grown);
    if (follows) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        correction[r] = exp2_hardware(shift[r] - next[r]);
        row_sum[r] *= correction[r];
        shift[r] = next[r];
      }
    }
    return follows;
  }
};

}  // namespace cupyflash
