// What FP8 numbers are to be multiplied by: one factor for each key-value head of each sequence.
#pragma once

#include "attention/sequence.cuh"

namespace cupyflash {

/// The factor of one head; 1 where there are none.
__device__ inline double descale_of(const float* factors, const DescaleStrides& strides,
                                    const Attention& attention, const Sequence& sequence,
                                    int head) {
  if (factors == nullptr || attention.batch == 0) return 1.0;
  const int64 batch = score_batch(sequence, attention.batch);
  return factors[batch * strides.batch + head / attention.group_size * strides.head];
}

/// From products of numbers of q and k to scores, all in one; finite. A cache's queries have none.
template <class T, class Params>
__device__ T descaled_scale(const Params& params, const Sequence& sequence, int head) {
  constexpr double largest = 3.4028234663852886e38;
  const Attention& attention = params.attention;
  double scale = attention.softmax_scale;
  if constexpr (requires { params.query_descale; }) {
    scale *=
        descale_of(params.query_descale, params.query_descale_strides, attention, sequence, head);
  }
  scale *= descale_of(params.key_descale, params.key_descale_strides, attention, sequence, head);
  return T(fmax(-largest, fmin(scale, largest)));
}

/// From sums of numbers of v to the output.
template <class T, class Params>
__device__ T descaled_value(const Params& params, const Sequence& sequence, int head) {
  return T(params.value_scale * descale_of(params.value_descale, params.value_descale_strides,
                                           params.attention, sequence, head));
}

}  // namespace cupyflash
