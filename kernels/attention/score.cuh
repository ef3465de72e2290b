// From the product q . k to the score, and the score's derivative, side by side.
#pragma once

#include "attention/sequence.cuh"

namespace cupyflash {

/// s = softmax_scale * (q . k); s = softcap * tanh(s / softcap); s += alibi.
template <class T, bool softcap, bool alibi>
struct Score {
  T scale;        // softmax_scale
  T cap;          // softcap
  T inverse_cap;  // 1 / softcap
  T slope;        // of this head's ALiBi
  int diagonal;   // key under query 0

  template <class Params>
  __device__ Score(const Params& params, const Sequence& sequence, int head)
      : scale(T(params.attention.softmax_scale)),
        cap(T(params.attention.softcap)),
        inverse_cap(softcap ? T(1) / cap : T(0)),
        slope(0),
        diagonal(sequence.diagonal(params.attention)) {
    if constexpr (alibi) {
      // Rows after the last varlen entry have no slope of their own, and see nothing anyway.
      const int batch = minimum(sequence.batch, params.attention.batch - 1);
      if (batch >= 0) {
        slope = T(params.alibi_slopes[batch * params.attention.alibi_batch_stride +
                                      head * params.attention.alibi_head_stride]);
      }
    }
  }

  __device__ T value(T product, int query_index, int key_index) const {
    T score = scale * product;
    if constexpr (softcap) score = cap * hyperbolic_tangent(score * inverse_cap);
    if constexpr (alibi) score -= slope * T(abs(query_index + diagonal - key_index));
    return score;
  }

  /// d value / d (scale * product).
  __device__ T derivative(T product) const {
    if constexpr (softcap) {
      const T capped = hyperbolic_tangent(scale * product * inverse_cap);
      return T(1) - capped * capped;
    } else {
      return T(1);
    }
  }
};

}  // namespace cupyflash
