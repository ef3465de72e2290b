// The running softmax statistics of a warp's 16 rows, as in softmax_mma.cuh: the scale is left to
// the exponent, and sums are rescaled seldom.
#pragma once

#include "arch/exponential.cuh"
#include "arch/opaque.cuh"
#include "tile/fragment_mma.cuh"

namespace cupyflash {

/// The maxima of a lane's two rows so far, as far as the lane has seen them, of even and of odd
/// columns: two chains, half the latency.
struct WgmmaMaxima {
  float at[2][2];

  __device__ explicit WgmmaMaxima(const float (&row_max)[2])
      : at{{row_max[0], -infinity<float>}, {row_max[1], -infinity<float>}} {}

  __device__ float of(int r) const { return fmaxf(at[r][0], at[r][1]); }

  __device__ void include(const float (&piece)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) at[e >> 1][e & 1] = fmaxf(at[e >> 1][e & 1], piece[e]);
  }
  /// The maxima of rows that had `row_max` and have all these scores too. Of numbers one of which
  /// is not negative, the largest has the largest bits, and three integers are compared at a time.
  /// (A NaN may hide others; it is the row's end anyway.)
  template <int n_tiles>
  __device__ static WgmmaMaxima over(const MmaFragment<1, n_tiles>& scores,
                                     const float (&row_max)[2]) {
    static_assert(n_tiles % 2 == 0);
    WgmmaMaxima maxima(row_max);
#pragma unroll
    for (int j = 0; j < n_tiles; j += 2) {
      maxima.include_by_bits(scores.at[0][j], scores.at[0][j + 1]);
    }
    const bool negative = __float_as_int(maxima.of(0)) < 0 || __float_as_int(maxima.of(1)) < 0;
    if (__any_sync(0xffffffffu, negative)) {
      maxima = WgmmaMaxima(row_max);
#pragma unroll
      for (int j = 0; j < n_tiles; ++j) maxima.include(scores.at[0][j]);
    }
    return maxima;
  }
  /// The compiler would look for the maxima behind all else, and keep the scores until then; it
  /// does not move that past this.
  __device__ void settle(float (&piece)[4]) {
    settle_both(reinterpret_cast<float (&)[4]>(at), piece);
  }

 private:
  __device__ void include_by_bits(const float (&a)[4], const float (&b)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float& largest = at[e >> 1][e & 1];
      largest = __int_as_float(
          __vimax3_s32(__float_as_int(largest), __float_as_int(a[e]), __float_as_int(b[e])));
    }
  }
};

/// P = exp2(score * factor - shift), where the shift follows the maximum only when that has grown
/// by more than `slack`: P is then at most 2**(top + slack), as exact relative to l as ever. For
/// e4m3, which ends at 448, P is scaled so that small ones are normal numbers down to 2**-12. For
/// unbounded scores the shift is in their unit, P = exp2((score - shift) * factor).
template <bool is_float8, bool unbounded>
struct WgmmaSoftmax {
  static_assert(!(is_float8 && unbounded), "`top` is in exponents of 2");
  static constexpr float top = is_float8 ? 6.0f : 0.0f;  // log2 of P at the maximum, at first
  static constexpr float slack = is_float8 ? 2.0f : 6.0f;
  static constexpr float log2e = 1.4426950408889634f;
  // As long as no key was seen: any exponent is then 0 or -inf, and P = 0.
  static constexpr float none = -3.4028234663852886e38f;

  float factor;      // from scores to exponents of 2, positive
  float row_max[2];  // of the scores, as far as the lane has seen them
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

  /// m in the unit of shifts, or `none`.
  __device__ float exponent(int r) const {
    return fmaxf(unbounded ? row_max[r] : row_max[r] * factor, none);
  }
  /// What sums relative to `before` are to be multiplied by to be relative to `after`.
  __device__ float ratio(float before, float after) const {
    return exp2_hardware(unbounded ? (before - after) * factor : before - after);
  }

  /// Turns scores, whose `maxima` are known, into probabilities. If true, alike in all lanes,
  /// earlier sums are to be multiplied by `correction`.
  template <int n_tiles>
  __device__ bool update(MmaFragment<1, n_tiles>& scores, const WgmmaMaxima& maxima,
                         float (&correction)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) row_max[r] = maxima.of(r);
    const bool follows = follow(correction);
#pragma unroll
    for (int j = 0; j < n_tiles; ++j) exponentiate(scores.at[0][j]);
    return follows;
  }

  /// The same without waiting for the maxima, which are found beside the exponentials: these are
  /// relative to the shift so far. False: some may be above 2**reach; then `row_max` alone is new.
  template <int reach, int n_tiles>
  __device__ bool update_eagerly(MmaFragment<1, n_tiles>& scores) {
    const float sum_before[2] = {row_sum[0], row_sum[1]};
    WgmmaMaxima maxima(row_max);
#pragma unroll
    for (int j = 0; j < n_tiles; ++j) {
      maxima.include(scores.at[0][j]);
      maxima.settle(scores.at[0][j]);
      exponentiate(scores.at[0][j]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) row_max[r] = maxima.of(r);
    const float grown = fmaxf(exponent(0) - shift[0], exponent(1) - shift[1]);
    if (!__any_sync(0xffffffffu, grown > float(reach))) return true;
#pragma unroll
    for (int r = 0; r < 2; ++r) row_sum[r] = sum_before[r];
    return false;
  }

  /// Lets the shift follow the maxima, if any row's has grown: true, alike in all lanes. Lanes of a
  /// row tell each other their maxima only then.
  __device__ bool follow(float (&correction)[2]) {
    constexpr float room = unbounded ? slack / log2e : slack;
    const bool grown = exponent(0) - top > shift[0] + room || exponent(1) - top > shift[1] + room;
    const bool follows = __any_sync(0xffffffffu, grown);
    if (follows) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        row_max[r] = quad_maximum(row_max[r]);
        const float next = exponent(r) - top;
        correction[r] = ratio(shift[r], next);
        row_sum[r] *= correction[r];
        shift[r] = next;
      }
    }
    return follows;
  }

 private:
  __device__ void exponentiate(float (&piece)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float shift = this->shift[e >> 1];
      piece[e] =
          exp2_hardware(unbounded ? (piece[e] - shift) * factor : fmaf(piece[e], factor, -shift));
      row_sum[e >> 1] += piece[e];
    }
  }
};

}  // namespace cupyflash
