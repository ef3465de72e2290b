// How the warps of a forward block share its tile, and what lies where in shared memory.
#pragma once

#include "attention/bias_mma.cuh"
#include "attention/config_mma.cuh"
#include "attention/softmax_mma.cuh"
#include "tile/multiply_mma.cuh"

namespace cupyflash {

template <MmaForwardConfig config>
struct MmaForwardShape {
  static constexpr int warp_rows = config.block_m / config.warps;
  static constexpr int m_tiles = warp_rows / 16;
  static constexpr int n_tiles = config.block_n / 8;
  static constexpr int n_tiles_v = config.head_dim_v / 8;
  static constexpr int widest_dim =
      config.head_dim > config.head_dim_v ? config.head_dim : config.head_dim_v;
  static_assert(m_tiles * 16 * config.warps == config.block_m && config.block_n % 16 == 0);

  using Scores = MmaFragment<m_tiles, n_tiles>;
  using Sums = MmaFragment<m_tiles, n_tiles_v>;
  using QueryTile = SwizzledTile<config.block_m, config.head_dim>;
  using KeyTile = SwizzledTile<config.block_n, config.head_dim>;
  using ValueTile = SwizzledTile<config.block_n, config.head_dim_v>;
  using OutTile = SwizzledTile<config.block_m, config.head_dim_v>;

  using Bias = BiasTile<config.block_m, config.block_n, config.bias_dtype>;

  // Shared memory: the query tile, later the output's; two key tiles; two value tiles; two of bias.
  static constexpr int query_bytes = config.block_m * widest_dim * 2;
  static constexpr int bias_offset = query_bytes + 2 * (KeyTile::bytes + ValueTile::bytes);
  static constexpr int bytes = bias_offset + (config.bias ? 2 * Bias::bytes : 0);
};

/// What a warp knows of its rows: m, l and the unnormalised output.
template <MmaForwardConfig config>
struct MmaForwardState {
  using Shape = MmaForwardShape<config>;
  MmaSoftmax<Shape::m_tiles, config.unbounded()> softmax;
  typename Shape::Sums sums;
};

}  // namespace cupyflash
