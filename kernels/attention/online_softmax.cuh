// The running softmax statistics m and l (FlashAttention-2, Algorithm 1), and the probabilities
// that the backward gets back from them. The only place that knows rows without keys.
#pragma once

#include "arch/exponential.cuh"
#include "tile/lanes.cuh"

namespace cupyflash {

/// What is subtracted in the exponent: m, or 0 for a row that has seen no key (exp(-inf) is 0,
/// where exp(-inf - -inf) would be NaN).
template <class T>
__device__ T finite_shift(T row_max) {
  return row_max == -infinity<T> ? T(0) : row_max;
}

/// 1 / l, or 0 for a row that has seen no key.
template <class T>
__device__ T inverse_sum(T row_sum) {
  return row_sum == T(0) ? T(0) : T(1) / row_sum;
}

/// Statistics of the lane's rows.
template <class T, int rows>
struct OnlineSoftmax {
  T row_max[rows];  // m, the same in all lanes of a row
  T row_sum[rows];  // the lane's part of l until `finish`

  __device__ OnlineSoftmax() {
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      row_max[i] = -infinity<T>;
      row_sum[i] = T(0);
    }
  }

  /// Turns scores into exp(score - m) with the new m. Sums of earlier tiles are to be multiplied
  /// by `correction`.
  template <int cols>
  __device__ void update(Fragment<T, rows, cols>& scores, T (&correction)[rows]) {
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      T tile_max = scores.at[i][0];
#pragma unroll
      for (int j = 1; j < cols; ++j) tile_max = maximum(tile_max, scores.at[i][j]);
      const T new_max = maximum(row_max[i], row_maximum(tile_max));
      const T shift = finite_shift(new_max);
      correction[i] = exp_difference(row_max[i], shift);
      row_max[i] = new_max;

      T tile_sum = T(0);
#pragma unroll
      for (int j = 0; j < cols; ++j) {
        scores.at[i][j] = exp_difference(scores.at[i][j], shift);
        tile_sum += scores.at[i][j];
      }
      row_sum[i] = multiply_add(row_sum[i], correction[i], tile_sum);
    }
  }

  /// Completes l.
  __device__ void finish() {
#pragma unroll
    for (int i = 0; i < rows; ++i) row_sum[i] = row_total(row_sum[i]);
  }

  /// Adds one more logit to row i's denominator, after `finish`; returns the correction.
  __device__ T add_sink(int i, T sink) {
    const T new_max = maximum(row_max[i], sink);
    const T shift = finite_shift(new_max);
    const T correction = exp_difference(row_max[i], shift);
    row_sum[i] = multiply_add(row_sum[i], correction, exp_difference(sink, shift));
    row_max[i] = new_max;
    return correction;
  }
};

}  // namespace cupyflash
