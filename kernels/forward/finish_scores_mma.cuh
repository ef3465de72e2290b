// From a warp's products to its scores: what is left to do of scale, softcap, bias, ALiBi and
// score_mod, at once or in slices that the main loop writes between its products.
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

/// The same in units of pieces, rows before columns, each seen by the softmax at once.
template <MmaForwardConfig config>
class MmaScoreFinisher {
 public:
  using Shape = MmaForwardShape<config>;
  using Scores = typename Shape::Scores;
  static constexpr bool needed = !config.raw_scores || config.alibi;
  static constexpr int m_tiles = Shape::m_tiles;
  static constexpr int unit = config.bias ? 2 : 1;  // pieces that share a read of the bias
  static constexpr int units = m_tiles * Shape::n_tiles / unit;

  __device__ MmaScoreFinisher(const Score<config>& score, const MmaScore<config>& score_of,
                              const typename Shape::Bias& tile, int warp_row, int warp_query,
                              int first_key)
      : score_(score),
        score_of_(score_of),
        query_(warp_query + MmaLane::row()),
        key_(first_key + MmaLane::col()),
        distance_(float(query_ + score_of.diagonal - key_)),
        reader_(tile, warp_row, 0) {}

  /// Units [first, end).
  template <class Softmax>
  __device__ void finish(Scores& scores, Softmax& softmax, int first, int end) {
#pragma unroll
    for (int u = first; u < end; ++u) {
      const int i = u % m_tiles, j = u / m_tiles * unit;
      if constexpr (needed) finish(scores, i, j);
#pragma unroll
      for (int k = 0; k < unit; ++k) softmax.see(i, scores.at[i][j + k]);
    }
  }

  /// After the last unit: whether bias or score_mod hide something, alike in all lanes.
  __device__ bool hide(Scores& scores) {
    bool hidden = false;
    if constexpr (config.score_mod) hidden = __any_sync(0xffffffffu, vanished_);
    if constexpr (config.bias) {
      const bool by_bias = __any_sync(0xffffffffu, reader_.hides());
      if (by_bias) hide_by_bias(scores, reader_);
      hidden = hidden || by_bias;
    }
    return hidden;
  }

 private:
  const Score<config>& score_;
  const MmaScore<config>& score_of_;
  int query_;
  int key_;
  float distance_;
  bool vanished_ = false;
  BiasReader<typename Shape::Bias, false> reader_;

  __device__ void finish(Scores& scores, int i, int j) {
    float bias[2][4] = {};
    if constexpr (config.bias) reader_.read(bias, i, j / 2);
#pragma unroll
    for (int e = 0; e < 4 * unit; ++e) {
      float& value = scores.at[i][j + e / 4][e % 4];
      const float added = bias[e / 4][e % 4];
      const int row = i * 16 + e % 4 / 2 * 8, col = j * 8 + e / 4 * 8 + e % 2;
      value = score_of_.of(value, added, distance_ + float(row - col)).value;
      if constexpr (config.score_mod) {
        value = score_.function.value(value, query_ + row, key_ + col);
        // Before the softmax sees it.
        if (config.bias && added == -infinity<float>) value = -infinity<float>;
        vanished_ = vanished_ || value == -infinity<float>;
      }
    }
  }
};

}  // namespace cupyflash
