// From a warp's products to its scores: what is left to do of scale, softcap, bias, ALiBi and
// score_mod.
#pragma once

#include "attention/score_mma.cuh"
#include "forward/shape_mma.cuh"

namespace cupyflash {

/// -inf wherever the bias is, whatever the product was.
template <int m_tiles, int n_tiles, class Reader>
__device__ void hide_by_bias(MmaFragment<m_tiles, n_tiles>& scores, Reader& reader) {
#pragma unroll
  for (int s = 0; s < n_tiles / 2; ++s) {
#pragma unroll
    for (int i = 0; i < m_tiles; ++i) {
      float bias[2][4];
      reader.read(bias, i, s);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const float value = bias[e / 4][e % 4];
        if (value == -infinity<float>) scores.at[i][2 * s + e / 4][e % 4] = value;
      }
    }
  }
}

/// ALiBi's part of scores, to which the products are then added.
template <MmaForwardConfig config>
__device__ void start_with_alibi(typename MmaForwardShape<config>::Scores& scores,
                                 const MmaScore<config>& score_of, int warp_query, int first_key) {
  using Shape = MmaForwardShape<config>;
  const float distance =
      float(warp_query + MmaLane::row() + score_of.diagonal - first_key - MmaLane::col());
#pragma unroll
  for (int i = 0; i < Shape::m_tiles; ++i) {
#pragma unroll
    for (int j = 0; j < Shape::n_tiles; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int away = i * 16 + e / 2 * 8 - j * 8 - e % 2;
        scores.at[i][j][e] = score_of.alibi_slope * fabsf(distance + float(away));
      }
    }
  }
}

/// All scores of a tile at once. Returns, alike in all lanes, whether bias or score_mod hide some.
template <MmaForwardConfig config>
__device__ bool finish_at_once(typename MmaForwardShape<config>::Scores& scores,
                               const Score<config>& score, const MmaScore<config>& score_of,
                               const typename MmaForwardShape<config>::Bias& tile, int warp_row,
                               int warp_query, int first_key) {
  using Shape = MmaForwardShape<config>;
  bool hidden = false;
  const float distance =
      float(warp_query + MmaLane::row() + score_of.diagonal - first_key - MmaLane::col());
  BiasReader<typename Shape::Bias, false> reader(tile, warp_row, 0);
#pragma unroll
  for (int s = 0; s < Shape::n_tiles / 2; ++s) {
#pragma unroll
    for (int i = 0; i < Shape::m_tiles; ++i) {
      float bias[2][4] = {};
      if constexpr (config.bias) reader.read(bias, i, s);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        float& value = scores.at[i][2 * s + e / 4][e % 4];
        const int away = i * 16 + e % 4 / 2 * 8 - s * 16 - e / 4 * 8 - e % 2;
        value = score_of.of(value, bias[e / 4][e % 4], distance + float(away)).value;
        if constexpr (config.score_mod) {
          value = score.function.value(value, warp_query + MmaLane::row() + i * 16 + e % 4 / 2 * 8,
                                       first_key + MmaLane::col() + s * 16 + e / 4 * 8 + e % 2);
          hidden = hidden || value == -infinity<float>;
        }
      }
    }
  }
  if constexpr (config.score_mod) hidden = __any_sync(0xffffffffu, hidden);
  if constexpr (config.bias) {
    const bool by_bias = __any_sync(0xffffffffu, reader.hides());
    if (by_bias) hide_by_bias(scores, reader);
    hidden = hidden || by_bias;
  }
  return hidden;
}

}  // namespace cupyflash
