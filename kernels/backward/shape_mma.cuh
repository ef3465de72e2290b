// How the warps of a block share its tiles, and what lies where in shared memory.
#pragma once

#include "attention/bias_mma.cuh"
#include "attention/config_mma.cuh"
#include "tile/fragment_mma.cuh"
#include "tile/swizzle.cuh"

namespace cupyflash {

template <MmaBackwardConfig config>
struct MmaBackwardShape {
  static constexpr bool exchange = config.query_warps > 1;  // of P and dS between warps
  static constexpr int warp_keys = config.block_n / config.key_warps;
  static constexpr int warp_queries = config.block_m / config.query_warps;
  static constexpr int warp_dim = config.head_dim / config.query_warps;
  static constexpr int warp_dim_v = config.head_dim_v / config.query_warps;
  static constexpr int m_tiles = warp_keys / 16;
  static constexpr int n_tiles = warp_queries / 8;
  static_assert(m_tiles * 16 * config.key_warps == config.block_n);
  static_assert(warp_queries % 16 == 0 && warp_dim % 16 == 0 && warp_dim_v % 16 == 0);

  // How the warps share a tile of dQ: at most as many rows as columns each, if it can be.
  __device__ static constexpr int dim_warps_of() {
    int warps = config.warps();
    while (warps > 1 && (config.head_dim % (16 * warps) != 0 ||
                         config.block_m * warps * warps > config.head_dim * config.warps())) {
      warps /= 2;
    }
    return warps;
  }
  static constexpr int dim_warps = dim_warps_of();
  static constexpr int sum_m_tiles = config.block_m * dim_warps / config.warps() / 16;
  static constexpr int sum_n_tiles = config.head_dim / dim_warps / 8;
  static_assert(sum_m_tiles * 16 * config.warps() == config.block_m * dim_warps);

  using Scores = MmaFragment<m_tiles, n_tiles>;
  using KeySums = MmaFragment<m_tiles, warp_dim / 8>;
  using ValueSums = MmaFragment<m_tiles, warp_dim_v / 8>;
  using QueryTile = SwizzledTile<config.block_m, config.head_dim>;
  using GradOutTile = SwizzledTile<config.block_m, config.head_dim_v>;
  using KeyTile = SwizzledTile<config.block_n, config.head_dim>;
  using ValueTile = SwizzledTile<config.block_n, config.head_dim_v>;
  using ScoreTile = SwizzledTile<config.block_n, config.block_m>;  // transposed

  using Bias = BiasTile<config.block_m, config.block_n, config.bias_dtype>;

  // Shared memory: K, V; Q and dO twice; dS twice, or P and dS; statistics twice; bias twice.
  static constexpr int value_offset = KeyTile::bytes;
  static constexpr int query_offset = value_offset + ValueTile::bytes;
  static constexpr int grad_out_offset = query_offset + 2 * QueryTile::bytes;
  static constexpr int score_offset = grad_out_offset + 2 * GradOutTile::bytes;
  static constexpr int statistics_offset = score_offset + 2 * ScoreTile::bytes;
  static constexpr int statistics_bytes = 3 * 4 * config.block_m;
  static constexpr int bias_offset = statistics_offset + 2 * statistics_bytes;
  static constexpr int bytes = bias_offset + (config.bias ? 2 * Bias::bytes : 0);

  // Divisions of what is not negative are shorter.
  __device__ static unsigned warp() { return warp_index(); }
  __device__ static int key_row() { return warp() / config.query_warps * warp_keys; }
  __device__ static int query_warp() { return warp() % config.query_warps; }
};

}  // namespace cupyflash
