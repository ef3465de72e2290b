// Shared memory of the Hopper backward, and the barriers by which its warps pass tiles on.
#pragma once

#include "attention/config_wgmma.cuh"
#include "tile/fragment_mma.cuh"
#include "tile/panels.cuh"
#include "tile/ring_position.cuh"

namespace cupyflash {

template <WgmmaBackwardConfig config>
struct WgmmaBackwardShape {
  using QueryTile = PanelTile<config.block_m, config.head_dim>;
  using GradOutTile = PanelTile<config.block_m, config.head_dim_v>;
  using KeyTile = PanelTile<config.block_n, config.head_dim>;
  using ValueTile = PanelTile<config.block_n, config.head_dim_v>;
  using ScoreTile = PanelTile<config.block_n, config.block_m>;  // dS^T

  static constexpr int warpgroup_rows = 64;
  static constexpr int n_tiles = config.block_m / 8;

  using Scores = MmaFragment<1, n_tiles>;
  using KeySums = MmaFragment<1, config.head_dim / 8>;
  using ValueSums = MmaFragment<1, config.head_dim_v / 8>;

  // Barriers; a word a thread; statistics; then tiles, which start at multiples of 1024: K, V, Q,
  // dO, dS twice, dQ in float32 unless it is added directly. With roles, dS once, of dQ a panel of
  // 64 columns for each role, P in float32.
  static constexpr int barrier_bytes = 512;
  static constexpr int statistics_offset = barrier_bytes + 4 * config.threads();
  static constexpr int statistics_bytes = 8 * config.block_m;
  static constexpr int key_offset =
      (statistics_offset + config.stages * statistics_bytes + 1023) / 1024 * 1024;
  static constexpr int value_offset = key_offset + KeyTile::bytes;
  static constexpr int query_offset = value_offset + ValueTile::bytes;
  static constexpr int grad_out_offset = query_offset + config.stages * QueryTile::bytes;
  static constexpr int score_offset = grad_out_offset + config.grad_out_stages * GradOutTile::bytes;
  static constexpr int score_tiles = config.roles ? 1 : 2;
  static constexpr int sums_offset = score_offset + score_tiles * ScoreTile::bytes;
  static constexpr int panel_bytes = 4 * config.block_m * 64;
  static constexpr int sums_bytes = config.direct  ? 0
                                    : config.roles ? 2 * panel_bytes
                                                   : 4 * config.block_m * config.sum_dim();
  static constexpr int handed_offset = sums_offset + sums_bytes;
  static constexpr int handed_bytes = config.roles ? 4 * config.block_m * config.block_n : 0;
  static constexpr int bytes = handed_offset + handed_bytes;
};

/// A tile's `full` phase ends when it is there, its `empty` phase when all who read it have done
/// so. K and V have one place each.
template <WgmmaBackwardConfig config>
struct BackwardPipeline {
  using Shape = WgmmaBackwardShape<config>;
  using QueryPosition = RingPosition<config.stages>;
  using GradOutPosition = RingPosition<config.grad_out_stages>;
  static constexpr int consumer_warps = 4 * config.consumers();
  static constexpr int value_warps = config.roles ? 4 : consumer_warps;  // that read V
  // Places for what is to be added to dQ, and the warps that share one: those of a role, too, where
  // dQ's columns are a single panel.
  static constexpr int sum_places = config.roles && !config.direct ? 2 : 1;
  static constexpr bool apart = sum_places == 2 || (config.roles && config.sum_dim() == 64);
  static constexpr int sum_warps = apart ? 4 : consumer_warps;

  unsigned shared;  // address of the block's shared memory

  __device__ typename Shape::KeyTile key() const { return {shared + Shape::key_offset}; }
  __device__ typename Shape::ValueTile value() const { return {shared + Shape::value_offset}; }
  __device__ typename Shape::QueryTile query(QueryPosition at) const {
    return {shared + Shape::query_offset + at.stage * Shape::QueryTile::bytes};
  }
  __device__ typename Shape::GradOutTile grad_out(GradOutPosition at) const {
    return {shared + Shape::grad_out_offset + at.stage * Shape::GradOutTile::bytes};
  }
  /// The exponents of 2 by which a query tile's scores are divided, and its D.
  __device__ unsigned shifts(QueryPosition at) const {
    return shared + Shape::statistics_offset + at.stage * Shape::statistics_bytes;
  }
  __device__ unsigned deltas(QueryPosition at) const { return shifts(at) + 4 * config.block_m; }
  /// dS^T; where there are two, they take turns.
  __device__ typename Shape::ScoreTile score(unsigned turn) const {
    return {shared + Shape::score_offset + turn % Shape::score_tiles * Shape::ScoreTile::bytes};
  }
  /// This thread's place for P^T in float32, which one warpgroup hands to another: 16 bytes, and
  /// 2048 to the next ones.
  __device__ unsigned handed() const {
    return shared + Shape::handed_offset + threadIdx.x % 128 * 16;
  }
  /// dQ of a query tile, in float32; or of a role a panel of it.
  __device__ unsigned sums(int role = 0) const {
    return shared + Shape::sums_offset + role * Shape::panel_bytes;
  }
  __device__ unsigned scratch() const { return shared + Shape::barrier_bytes + 4 * threadIdx.x; }

  /// dQ, or a role's panel of it, is there; or, if it is added directly in turns, has been added.
  __device__ AsyncBarrier sums_full(int role = 0) const { return barrier(0, role); }
  __device__ AsyncBarrier sums_empty(int role = 0) const { return barrier(1, role); }
  /// With `deterministic`: a phase ends when the block's turn at a query tile has come.
  __device__ AsyncBarrier turn() const { return barrier(10, 0); }
  /// And if dQ is added directly: when the sums of a turn are known to have been added.
  __device__ AsyncBarrier turn_used() const { return barrier(11, 0); }
  __device__ AsyncBarrier query_full(QueryPosition at) const { return barrier(2, at.stage); }
  __device__ AsyncBarrier query_empty(QueryPosition at) const { return barrier(3, at.stage); }
  __device__ AsyncBarrier grad_out_full(GradOutPosition at) const { return barrier(4, at.stage); }
  __device__ AsyncBarrier grad_out_empty(GradOutPosition at) const { return barrier(5, at.stage); }
  __device__ AsyncBarrier key_full() const { return barrier(6, 0); }
  __device__ AsyncBarrier key_empty() const { return barrier(7, 0); }
  __device__ AsyncBarrier value_full() const { return barrier(8, 0); }
  __device__ AsyncBarrier value_empty() const { return barrier(9, 0); }

  /// By all threads of the block.
  __device__ void initialise() const {
    if (threadIdx.x == 0) {
      for (int role = 0; role < sum_places; ++role) {
        sums_full(role).initialise(sum_warps);
        sums_empty(role).initialise(1);
      }
      if constexpr (config.deterministic) {
        turn().initialise(1);
        turn_used().initialise(1);
      }
      key_full().initialise(1);
      key_empty().initialise(consumer_warps);
      value_full().initialise(1);
      value_empty().initialise(value_warps);
      for (int stage = 0; stage < config.stages; ++stage) {
        query_full({stage}).initialise(1);
        query_empty({stage}).initialise(32 * consumer_warps);
      }
      for (int stage = 0; stage < config.grad_out_stages; ++stage) {
        grad_out_full({stage}).initialise(1);
        grad_out_empty({stage}).initialise(consumer_warps);
      }
      publish_barriers();
    }
    __syncthreads();
  }

 private:
  __device__ AsyncBarrier barrier(int kind, int stage) const {
    return {shared + 32 * kind + 8 * stage};
  }
};

}  // namespace cupyflash
