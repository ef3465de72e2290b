// From products to scores on fragments of mma.sync: the formulas of `score`, in fewer instructions.
#pragma once

#include "arch/exponential.cuh"
#include "attention/score.cuh"

namespace cupyflash {

/// What the derivative of a folded score, see `config_mma`, waits to be multiplied by.
constexpr float folded_slope = 4.0f;

/// A score, and its derivative by softmax_scale * (q . k).
struct ScoreAndSlope {
  float value;
  float slope;
};

template <auto config>
struct MmaScore {
  static constexpr bool plain = !config.softcap && !config.alibi && !config.bias;

  float scale;        // softmax_scale; raw: 1, as it is left to the exponent
  float cap;          // softcap
  float rate;         // exponents of 2 for softcap's exponential; or 1 / softcap, see `capped`
  float alibi_slope;  // negative; raw: divided by softmax_scale
  int diagonal;       // key under query 0

  __device__ explicit MmaScore(const Score<config>& score) {
    const float given = score.scale;
    scale = config.raw_scores ? 1.0f : given;
    diagonal = score.diagonal;
    if constexpr (config.alibi)
      alibi_slope = config.raw_scores ? -score.slope / given : -score.slope;
    if constexpr (config.softcap) {
      constexpr float twice_log2e = 2.885390081777927f;
      constexpr float least = 1.1754943508222875e-38f;
      cap = score.cap;
      rate = config.exact_softcap ? score.inverse_cap : given * score.inverse_cap * twice_log2e;
      if (rate == 0.0f) rate = least;  // 0 times the product of a hidden key, -inf, would be NaN
    }
  }

  /// softcap * tanh(x / softcap) = softcap - 2 softcap / (1 + exp(2 x / softcap)). What cancels is
  /// a rounding error of softcap: large ones take the function of the library.
  __device__ ScoreAndSlope capped(float product) const {
    if constexpr (config.exact_softcap) {
      const float tangent = hyperbolic_tangent(product * scale * rate);
      // Of a hidden key, whose product is -inf, the tangent is NaN if the scale is 0.
      return {cap * tangent, fmaxf(1.0f - tangent * tangent, 0.0f)};
    } else if constexpr (config.folded_cap()) {
      const float folded = reciprocal_hardware(-1.0f - exp2_hardware(product * rate));
      return {folded, fmaf(-folded, folded, -folded)};
    } else {
      const float inverse = reciprocal_hardware(1.0f + exp2_hardware(product * rate));
      return {fmaf(-2.0f * cap, inverse, cap), 4.0f * fmaf(-inverse, inverse, inverse)};
    }
  }

  /// `distance` is query + diagonal - key. A bias of -inf gives -inf or, with bad products, NaN.
  __device__ ScoreAndSlope of(float product, float bias, float distance) const {
    ScoreAndSlope result = {product, 1.0f};
    if constexpr (config.softcap) {
      result = capped(product);
      if constexpr (config.bias) result.value += bias;
    } else if constexpr (config.bias) {
      result.value = fmaf(product, scale, bias);
    } else if constexpr (!config.raw_scores) {
      result.value = product * scale;
    }
    if constexpr (config.alibi) result.value = fmaf(alibi_slope, fabsf(distance), result.value);
    return result;
  }
};

}  // namespace cupyflash
