// What the parts of the tensor-core backward share: a block's tiles in shared memory, and what a
// query head contributes.
#pragma once

#include "attention/dropout.cuh"
#include "attention/mask_mma.cuh"
#include "attention/params_mma.cuh"
#include "attention/score_mma.cuh"
#include "attention/tile_walk.cuh"
#include "backward/bias_gradient_mma.cuh"
#include "backward/modified_gradient_mma.cuh"
#include "backward/shape_mma.cuh"
#include "tile/load_swizzled.cuh"
#include "tile/multiply_mma.cuh"

namespace cupyflash {

/// A key tile's thread block.
template <MmaBackwardConfig config>
struct MmaBackwardBlock {
  using Shape = MmaBackwardShape<config>;
  using Scores = typename Shape::Scores;
  using KeySums = typename Shape::KeySums;
  using ValueSums = typename Shape::ValueSums;
  using QueryTile = typename Shape::QueryTile;
  using GradOutTile = typename Shape::GradOutTile;
  using KeyTile = typename Shape::KeyTile;
  using ValueTile = typename Shape::ValueTile;
  using ScoreTile = typename Shape::ScoreTile;
  using Rows = GlobalRows<const Element<config.dtype>>;
  using Bias = typename Shape::Bias;
  using Walk = TileWalk<config.visibility, 1>;
  using BiasGradientTile = cupyflash::BiasGradientTile<config, Shape::m_tiles, Shape::n_tiles>;
  static constexpr int m_tiles = Shape::m_tiles;
  static constexpr int n_tiles = Shape::n_tiles;
  static constexpr int pieces = m_tiles * n_tiles;
  // Pieces that share random numbers, or a read of the bias.
  static constexpr int unit = config.dropout || config.bias ? 2 : 1;
  static constexpr int units = pieces / unit;
  // Softcap's derivative then waits for score_mod's, and for the bias's gradient.
  static constexpr bool late_slope = config.softcap && (config.bias || config.score_mod);
  // dS in shared memory, rounded, is then not the bias's gradient.
  static constexpr bool staged_bias = config.bias && config.bias_rows && config.bias_cols &&
                                      !late_slope && !config.bias_in_tiles &&
                                      config.block_n % 32 == 0;

  template <class Tile>
  using Loader = SwizzledLoader<Tile, config.threads(), config.load_width, Element<config.dtype>>;

  using Probabilities = MmaOperand<m_tiles, n_tiles>;

  /// What the way back from the gradients by final scores needs.
  struct Late {
    Scores unmodified;  // the scores before score_mod
    Scores slopes;      // softcap's derivatives, if they are to wait
  };

  /// What one query head contributes.
  struct Head {
    Loader<QueryTile> query;
    Loader<GradOutTile> grad_out;
    const MmaBackwardParams& params;
    int64 scratch;  // row of the sequence's first query
    int* turns;     // of the sequence's first query tile
    Score<config> score;
    MmaScore<config> score_of;
    ElementMask<config> mask;
    TileStates<config.visibility> states;  // of this key tile
    Dropout<config> dropout;
    float kept_share;  // by dropout
    BiasGradient<config> grad_bias;
    int batch;
    int index;
  };

  unsigned shared;  // address of the block's shared memory
  Band band;        // queries by keys
  int first_key;
  float factor;  // from scores to exponents of 2

  __device__ KeyTile key_tile() const { return {shared}; }
  __device__ ValueTile value_tile() const { return {shared + Shape::value_offset}; }
  __device__ QueryTile query_tile(int m) const {
    return {shared + Shape::query_offset + (m & 1) * QueryTile::bytes};
  }
  __device__ GradOutTile grad_out_tile(int m) const {
    return {shared + Shape::grad_out_offset + (m & 1) * GradOutTile::bytes};
  }
  /// dS^T; with an exchange, P^T is in the other.
  __device__ ScoreTile score_tile(int m) const {
    return {shared + Shape::score_offset + (Shape::exchange ? 0 : m & 1) * ScoreTile::bytes};
  }
  __device__ ScoreTile probability_tile() const {
    return {shared + Shape::score_offset + ScoreTile::bytes};
  }
  /// m * log2(e), 1 / l, D, block_m of each.
  __device__ unsigned statistics(int m) const {
    return shared + Shape::statistics_offset + (m & 1) * Shape::statistics_bytes;
  }

  __device__ Bias bias_tile(int m) const {
    return {shared + Shape::bias_offset + (m & 1) * Bias::bytes};
  }
};

}  // namespace cupyflash
