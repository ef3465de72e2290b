// From the product q . k to the score, and the score's derivative, side by side.
#pragma once

#include "arch/convert.cuh"
#include "attention/descale.cuh"
#include "attention/score_mod.cuh"
#include "attention/sequence.cuh"

namespace cupyflash {

/// A bias in the accumulator's type; finite values stay finite.
template <class T, class Element>
__device__ T finite_as(Element value) {
  if constexpr (sizeof(Element) > sizeof(T)) {
    constexpr T largest = T(3.4028234663852886e38);
    const T narrow = T(value);
    const bool overflow = fabs(narrow) == infinity<T> && fabs(value) != infinity<Element>;
    return overflow ? copysign(largest, narrow) : narrow;
  } else {
    return to_accumulator(value);
  }
}

/// The bias of one head of one sequence.
template <class T, class Element>
struct BiasPlane {
  const Element* first;  // row 0, column 0
  ScoreStrides strides;

  /// 0 where there is none: past the ends.
  __device__ T at(int row, int col) const {
    return strides.contains(row, col) ? finite_as<T>(first[strides.at(row, col)]) : T(0);
  }
};

/// s = softmax_scale * (q . k); s = softcap * tanh(s / softcap); s += bias; s += alibi; then what
/// the user makes of s. A bias of -inf hides, whatever the product is.
template <auto config>
struct Score {
  using T = Accumulator<config.dtype>;
  using Bias = Element<config.bias_dtype>;

  T scale;        // softmax_scale
  T cap;          // softcap
  T inverse_cap;  // 1 / softcap
  T slope;        // of this head's ALiBi
  int diagonal;   // key under query 0
  BiasPlane<T, Bias> bias;
  ScoreFunction<T, config.score_mod> function;

  template <class Params>
  __device__ Score(const Params& params, const Sequence& sequence, int head)
      : scale(T(params.attention.softmax_scale)),
        cap(T(params.attention.softcap)),
        inverse_cap(config.softcap ? T(1) / cap : T(0)),
        slope(0),
        diagonal(sequence.diagonal(params.attention)) {
    if constexpr (config.float8_keys()) scale = descaled_scale<T>(params, sequence, head);
    if constexpr (config.alibi) {
      // Rows after the last varlen entry have no slope of their own, and see nothing anyway.
      const int batch = minimum(sequence.batch, params.attention.batch - 1);
      if (batch >= 0) {
        slope = T(params.alibi_slopes[batch * params.attention.alibi_batch_stride +
                                      head * params.attention.alibi_head_stride]);
      }
    }
    if constexpr (config.bias) {
      const ScoreStrides& strides = params.scores.bias;
      const int64 batch = score_batch(sequence, params.attention.batch);
      bias = {static_cast<const Bias*>(params.bias) + batch * strides.batch + head * strides.head,
              strides};
    }
    if constexpr (config.score_mod) {
      function = {{{params.score_params, params.scores.param_sizes}}, sequence.batch, head};
    }
  }

  __device__ T value(T product, int query_index, int key_index) const {
    const T added = bias_at(query_index, key_index);
    T score = unmodified(product, added, query_index, key_index);
    if constexpr (config.score_mod) score = function.value(score, query_index, key_index);
    if constexpr (config.bias) {
      if (added == -infinity<T>) score = -infinity<T>;
    }
    return score;
  }

  /// What score_mod is given.
  __device__ T unmodified(T product, int query_index, int key_index) const {
    return unmodified(product, bias_at(query_index, key_index), query_index, key_index);
  }

  /// d value / d unmodified.
  __device__ T factor(T product, int query_index, int key_index) const {
    if constexpr (config.score_mod) {
      return function.factor(unmodified(product, query_index, key_index), query_index, key_index);
    } else {
      return T(1);
    }
  }

  /// d unmodified / d (scale * product).
  __device__ T derivative(T product) const {
    if constexpr (config.softcap) {
      const T capped = hyperbolic_tangent(scale * product * inverse_cap);
      return T(1) - capped * capped;
    } else {
      return T(1);
    }
  }

 private:
  __device__ T bias_at(int query_index, int key_index) const {
    if constexpr (config.bias) return bias.at(query_index, key_index);
    return T(0);
  }

  __device__ T unmodified(T product, T added, int query_index, int key_index) const {
    T score = scale * product;
    if constexpr (config.softcap) score = cap * hyperbolic_tangent(score * inverse_cap);
    if constexpr (config.bias) score += added;
    if constexpr (config.alibi) score -= slope * T(abs(query_index + diagonal - key_index));
    return score;
  }
};

}  // namespace cupyflash
