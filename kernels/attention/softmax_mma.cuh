// The running softmax statistics of a warp's rows, for kernels that leave the scale to the
// exponent and rescale their sums seldom.
//
// P = exp2(score * factor - shift) with a shift that follows the maximum only when that has grown
// by more than `slack`: P is then at most 2**slack, as exact relative to l as ever, and the sums
// are multiplied a few times a row instead of once a tile. For unbounded scores the shift is in
// their unit, P = exp2((score - shift) * factor).
#pragma once

#include "arch/exponential.cuh"
#include "arch/pack.cuh"
#include "tile/fragment_mma.cuh"

namespace cupyflash {

template <int m_tiles, bool unbounded>
struct MmaSoftmax {
  static constexpr float slack = 6.0f;  // in exponents of 2
  static constexpr float log2e = 1.4426950408889634f;
  // As long as no key was seen: any exponent is then 0 or -inf, and P = 0.
  static constexpr float none = -3.4028234663852886e38f;

  float factor;               // from scores to exponents of 2, positive
  float row_max[m_tiles][2];  // of the scores, the lane's part
  float shift[m_tiles][2];    // subtracted from exponents, always finite
  float row_sum[m_tiles][2];  // relative to shift, the lane's part

  __device__ explicit MmaSoftmax(float factor) : factor(factor) {
#pragma unroll
    for (int i = 0; i < m_tiles; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        row_max[i][r] = -infinity<float>;
        shift[i][r] = none;
        row_sum[i][r] = 0.0f;
      }
    }
  }

  __device__ void see(int i, const float (&scores)[4]) {
    row_max[i][0] = fmaxf(row_max[i][0], fmaxf(scores[0], scores[1]));
    row_max[i][1] = fmaxf(row_max[i][1], fmaxf(scores[2], scores[3]));
  }

  /// A score in the unit of shifts.
  __device__ float scaled(float score) const { return unbounded ? score : score * factor; }
  /// The exponent of 2 of a score, relative to a shift.
  __device__ float exponent(float score, float shift) const {
    return unbounded ? (score - shift) * factor : fmaf(score, factor, -shift);
  }
  /// What sums relative to `before` are to be multiplied by to be relative to `after`.
  __device__ float correction(float before, float after) const {
    return exp2_hardware(unbounded ? (before - after) * factor : before - after);
  }

  /// Returns, alike in all lanes, whether a shift has to follow. Only then do the lanes of a row
  /// tell each other their maxima.
  __device__ bool must_follow() const {
    bool follow = false;
#pragma unroll
    for (int i = 0; i < m_tiles; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        follow =
            follow || scaled(row_max[i][r]) > shift[i][r] + (unbounded ? slack / log2e : slack);
      }
    }
    return __any_sync(0xffffffffu, follow);
  }

  /// Lets the shifts follow the maxima; earlier sums are to be multiplied by `correction`.
  __device__ void follow(float (&correction)[m_tiles][2]) {
#pragma unroll
    for (int i = 0; i < m_tiles; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        row_max[i][r] = quad_maximum(row_max[i][r]);
        const float next = fmaxf(scaled(row_max[i][r]), none);
        correction[i][r] = this->correction(shift[i][r], next);
        row_sum[i][r] *= correction[i][r];
        shift[i][r] = next;
      }
    }
  }

  /// Four scores of row tile i become two pairs of probabilities; `keep` says which of them dropout
  /// leaves, all being summed up.
  template <DataType dtype>
  __device__ void exponentiate(int i, const float (&scores)[4], unsigned& upper, unsigned& lower,
                               const bool (&keep)[4] = {true, true, true, true}) {
    float p[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      p[e] = exp2_hardware(exponent(scores[e], shift[i][e >> 1]));
    }
    row_sum[i][0] += p[0] + p[1];
    row_sum[i][1] += p[2] + p[3];
#pragma unroll
    for (int e = 0; e < 4; ++e) p[e] = keep[e] ? p[e] : 0.0f;
    upper = pack_pair<dtype>(p[0], p[1]);
    lower = pack_pair<dtype>(p[2], p[3]);
  }
};

}  // namespace cupyflash
