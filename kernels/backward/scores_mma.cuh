// P and dS of a tile of transposed scores, in slices that the main loop writes between its
// products.
#pragma once

#include "arch/exponential.cuh"
#include "backward/block_mma.cuh"

namespace cupyflash {

template <MmaBackwardConfig config>
struct MmaScoreGradients {
  using Block = MmaBackwardBlock<config>;
  using Shape = typename Block::Shape;
  using Head = typename Block::Head;
  using Scores = typename Block::Scores;
  using Probabilities = typename Block::Probabilities;
  static constexpr int m_tiles = Block::m_tiles;
  static constexpr bool changed = !config.raw_scores || config.alibi;
  // Whether tiles where no band and no mask hides anything go without checks for what is hidden.
  static constexpr bool seldom_careful = changed && !config.score_mod;

  /// D of two queries; with dropout times 1 - p, whose inverse all gradients of scores wait for.
  __device__ static float2 delta_of(const Head& head, unsigned stat, int j) {
    float2 delta = load_shared_pair(stat + (2 * config.block_m + j * 8) * 4);
    if constexpr (config.dropout) {
      delta.x *= head.kept_share;
      delta.y *= head.kept_share;
    }
    return delta;
  }

  /// Units [first, end) of P = exp(S - m) / l as operands, without what dropout drops; in place of
  /// the scores what dS is to be multiplied by: P, times softcap's derivative, negative where P was
  /// dropped. Returns whether the bias or score_mod hides something, for this lane. `careful`: what
  /// is hidden is so whatever its product is; without it the bias needs `hide_by_bias`.
  template <bool careful>
  __device__ static bool exponentiate_slice(const Block& block, const Head& head, Scores& scores,
                                            typename Block::Late& late, Probabilities& p,
                                            const typename Block::Walk& walk, int first, int end) {
    const int query_col = Shape::query_warp() * Shape::warp_queries;
    const int query_index = walk.tile(0) * config.block_m + query_col + MmaLane::col();
    const int key_index = block.first_key + Shape::key_row() + MmaLane::row();
    const unsigned stat = block.statistics(walk.slot()) + (query_col + MmaLane::col()) * 4;
    BiasReader<typename Block::Bias, true> reader(block.bias_tile(walk.slot()), query_col,
                                                  Shape::key_row());
    const float distance = float(query_index + head.score_of.diagonal - key_index);
    bool hidden = false;
#pragma unroll
    for (int u = first; u < end; ++u) {
      const int i = u % m_tiles, pair = u / m_tiles;
      float bias[2][4] = {};
      if constexpr (config.bias) reader.read(bias, i, pair);
      uint4 words[2];
      if constexpr (config.dropout) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          words[c] = head.dropout.words(query_index + pair * 16 + c, key_index + i * 16);
        }
      }
#pragma unroll
      for (int k = 0; k < Block::unit; ++k) {
        const int j = pair * Block::unit + k;
        const float2 shift = load_shared_pair(stat + j * 32);
        const float2 inverse = load_shared_pair(stat + (config.block_m + j * 8) * 4);
        float (&s)[4] = scores.at[i][j];
        float kept[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float row_shift = e % 2 == 0 ? shift.x : shift.y;
          const float row_inverse = e % 2 == 0 ? inverse.x : inverse.y;
          ScoreAndSlope score = {s[e], 1.0f};
          if constexpr (changed) {
            const int away = j * 8 + e % 2 - i * 16 - e / 2 * 8;
            score = head.score_of.of(s[e], bias[k][e], distance + float(away));
            if constexpr (config.score_mod) {
              late.unmodified.at[i][j][e] = score.value;
              score.value = head.score.function.value(score.value, query_index + j * 8 + e % 2,
                                                      key_index + i * 16 + e / 2 * 8);
              hidden = hidden || score.value == -infinity<float>;
            }
            // Whatever the product, or the scale's sign, is.
            if (careful && (s[e] == -infinity<float> || bias[k][e] == -infinity<float>)) {
              score.value = -infinity<float>;
            }
          }
          const float exponent = config.unbounded() ? (score.value - row_shift) * block.factor
                                                    : fmaf(score.value, block.factor, -row_shift);
          const float probability = exp2_hardware(exponent) * row_inverse;
          kept[e] = probability;
          s[e] = config.softcap && !Block::late_slope ? probability * score.slope : probability;
          if constexpr (Block::late_slope) late.slopes.at[i][j][e] = score.slope;
          if constexpr (config.dropout) {
            const uint4& four = words[e % 2];
            const unsigned word = e < 2 ? (k == 0 ? four.x : four.z) : (k == 0 ? four.y : four.w);
            if (!head.dropout.keeps(word)) {
              kept[e] = 0.0f;
              s[e] = -s[e];
            }
          }
        }
        p.upper(i, j) = pack_pair<config.dtype>(kept[0], kept[1]);
        p.lower(i, j) = pack_pair<config.dtype>(kept[2], kept[3]);
      }
    }
    return hidden || (config.bias && reader.hides());
  }

  /// P = 0 where the bias is -inf.
  __device__ static void hide_by_bias(const Block& block, Scores& scores, Probabilities& p,
                                      int slot) {
    BiasReader<typename Block::Bias, true> reader(
        block.bias_tile(slot), Shape::query_warp() * Shape::warp_queries, Shape::key_row());
#pragma unroll
    for (int i = 0; i < m_tiles; ++i) {
#pragma unroll
      for (int j = 0; j < Block::n_tiles; j += 2) {
        float bias[2][4];
        reader.read(bias, i, j / 2);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          if (bias[e / 4][e % 4] != -infinity<float>) continue;
          scores.at[i][j + e / 4][e % 4] = 0.0f;
          unsigned& pair = e % 4 < 2 ? p.upper(i, j + e / 4) : p.lower(i, j + e / 4);
          pair &= e % 2 == 0 ? 0xffff0000u : 0x0000ffffu;
        }
      }
    }
  }

  /// Sets to 0 the slopes of what is not seen: its value may hold NaN.
  __device__ static void clear_hidden(const Scores& p, Scores& slopes) {
#pragma unroll
    for (int i = 0; i < m_tiles; ++i) {
#pragma unroll
      for (int j = 0; j < Block::n_tiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (p.at[i][j][e] == 0.0f) slopes.at[i][j][e] = 0.0f;
        }
      }
    }
  }

  /// Pieces [first, end) of dS = P (dP - D), as operands; on the way the gradients of score_mod's
  /// arrays and of the bias.
  __device__ static void differentiate_slice(const Head& head, const Scores& p,
                                             const typename Block::Late& late, const Scores& slopes,
                                             Probabilities& ds, ModifiedGradient<config>& modified,
                                             typename Block::BiasGradientTile& grad_bias,
                                             unsigned stat, int first, int end) {
#pragma unroll
    for (int piece = first; piece < end; ++piece) {
      const int i = piece % m_tiles, j = piece / m_tiles;
      float2 delta;
      if constexpr (config.dropout) delta = delta_of(head, stat, j);
      float product[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float probability = p.at[i][j][e];
        float slope = slopes.at[i][j][e];
        if constexpr (config.dropout) {
          if (probability < 0.0f) slope = e % 2 == 0 ? delta.x : delta.y;  // dropped: -P (-D)
        }
        product[e] = probability * slope;
      }
      if constexpr (config.score_mod) modified.apply(i, j, late.unmodified.at[i][j], product);
      if constexpr (config.bias && !Block::staged_bias) grad_bias.add(i, j, product);
      if constexpr (Block::late_slope) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          // Where nothing is seen the slope may be NaN.
          if (product[e] != 0.0f) product[e] *= late.slopes.at[i][j][e];
        }
      }
      ds.upper(i, j) = pack_pair<config.dtype>(product[0], product[1]);
      ds.lower(i, j) = pack_pair<config.dtype>(product[2], product[3]);
    }
  }

  /// Pieces [first, end) of an operand into a transposed score tile.
  __device__ static void store_slice(const typename Block::ScoreTile& tile, const Probabilities& p,
                                     int first, int end) {
    const int row = Shape::key_row() + MmaLane::row();
    const int col = Shape::query_warp() * Shape::warp_queries + MmaLane::col();
#pragma unroll
    for (int piece = first; piece < end; ++piece) {
      const int i = piece % m_tiles, j = piece / m_tiles;
      store_shared(tile.pair(row + i * 16, col + j * 8), p.upper(i, j));
      store_shared(tile.pair(row + i * 16 + 8, col + j * 8), p.lower(i, j));
    }
  }
};

}  // namespace cupyflash
