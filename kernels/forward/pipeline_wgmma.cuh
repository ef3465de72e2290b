// Shared memory of the Hopper forward, and the barriers by which its warpgroups pass tiles on.
#pragma once

#include "arch/shared_memory.cuh"
#include "attention/config_wgmma.cuh"
#include "tile/panels.cuh"
#include "tile/ring_position.cuh"
#include "tile/row_stage.cuh"

namespace cupyflash {

template <WgmmaForwardConfig config>
struct WgmmaForwardShape {
  static constexpr bool transposes = is_float8(config.dtype);
  static constexpr int itemsize = config.itemsize();
  using QueryTile = PanelTile<config.block_m, config.head_dim, itemsize>;
  using KeyTile = PanelTile<config.block_n, config.head_dim, itemsize>;
  using LandedTile = PanelTile<config.block_n, config.head_dim_v, itemsize>;  // values as they come
  using TransposedTile = PanelTile<config.head_dim_v, config.block_n, itemsize>;
  using ProbabilityTile = PanelTile<config.block_m, config.block_n, itemsize>;
  using BiasTile = PanelTile<config.block_m, config.block_n>;
  using ValueTile = typename Either<transposes, TransposedTile, LandedTile>::Type;

  // Each consumer warpgroup has 64 rows, each of its warps 16.
  static constexpr int warpgroup_rows = 64;
  static constexpr int n_tiles = config.block_n / 8;
  static constexpr int n_tiles_v = config.head_dim_v / 8;
  using Scores = MmaFragment<1, n_tiles>;
  using Sums = MmaFragment<1, n_tiles_v>;

  static constexpr int barrier_bytes = 512;
  // A word a thread; tiles start at multiples of 1024.
  static constexpr int query_offset = (barrier_bytes + 4 * config.threads() + 1023) / 1024 * 1024;
  static constexpr int key_offset = query_offset + config.query_tiles * QueryTile::bytes;
  static constexpr int value_offset = key_offset + config.stages * KeyTile::bytes;
  static constexpr int landed_offset = value_offset + config.stages * ValueTile::bytes;
  static constexpr int probability_offset =
      landed_offset + transposes * config.stages * LandedTile::bytes;
  static constexpr int bias_offset =
      probability_offset + config.shared_probabilities * ProbabilityTile::bytes;
  static constexpr int stage_offset = bias_offset + config.bias_stages * BiasTile::bytes;
  static_assert(config.bias == (config.bias_stages > 0) && !(config.bias && transposes));
  // Of a warp's rows of out; where P is in shared memory, in its place.
  using Stage = RowStage<config.staged, config.block_m>;
  static_assert(!config.shared_probabilities || Stage::Tile::bytes <= ProbabilityTile::bytes);
  static constexpr int bytes =
      stage_offset + (config.staged > 0 && !config.shared_probabilities) * Stage::Tile::bytes;
};

/// A tile's `full` phase ends when copies have brought it, its `empty` phase when all consumer
/// warps have read it.
template <WgmmaForwardConfig config>
struct ForwardPipeline {
  using Shape = WgmmaForwardShape<config>;
  using Position = RingPosition<config.stages>;
  using QueryPosition = RingPosition<config.query_tiles>;
  using BiasPosition =
      typename Either<config.bias, RingPosition<config.bias_stages>, Nothing>::Type;
  using DealtPosition = RingPosition<2>;
  static constexpr int consumer_warps = 4 * config.consumers();
  static constexpr int transposing_warps = 3;

  unsigned shared;  // address of the block's shared memory

  __device__ typename Shape::QueryTile query(QueryPosition at) const {
    return {shared + Shape::query_offset + at.stage * Shape::QueryTile::bytes};
  }
  __device__ typename Shape::KeyTile key(Position at) const {
    return {shared + Shape::key_offset + at.stage * Shape::KeyTile::bytes};
  }
  __device__ typename Shape::ValueTile value(Position at) const {
    return {shared + Shape::value_offset + at.stage * Shape::ValueTile::bytes};
  }

  /// Where values come to: where they are read, unless they are to be transposed.
  __device__ typename Shape::LandedTile landed(Position at) const {
    constexpr int offset = Shape::transposes ? Shape::landed_offset : Shape::value_offset;
    return {shared + offset + at.stage * Shape::LandedTile::bytes};
  }

  __device__ typename Shape::BiasTile bias(BiasPosition at) const {
    return {shared + Shape::bias_offset + at.stage * Shape::BiasTile::bytes};
  }

  /// P, rounded, of all consumers.
  __device__ typename Shape::ProbabilityTile probabilities() const {
    return {shared + Shape::probability_offset};
  }

  /// Of the warp whose rows of a query tile start at `warp_row`.
  __device__ typename Shape::Stage stage(int warp_row) const {
    constexpr int offset =
        config.shared_probabilities ? Shape::probability_offset : Shape::stage_offset;
    return {shared + offset + warp_row * Shape::Stage::Tile::Panel::pitch};
  }

  /// This warp has read what the barrier stands for.
  __device__ static void release(AsyncBarrier empty) {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) empty.arrive();
  }

  /// The assembler would move the wait that follows to before the arithmetic that is to run beside
  /// the products; not so if a store, which nobody reads, needs its result first.
  __device__ void hold_back(unsigned result) const {
    store_shared(shared + Shape::barrier_bytes + 4 * threadIdx.x, result);
  }

  __device__ AsyncBarrier query_full(QueryPosition at) const { return barrier(0, at.stage); }
  __device__ AsyncBarrier query_empty(QueryPosition at) const { return barrier(1, at.stage); }
  __device__ AsyncBarrier key_full(Position at) const { return barrier(2, at.stage); }
  __device__ AsyncBarrier key_empty(Position at) const { return barrier(3, at.stage); }
  __device__ AsyncBarrier value_full(Position at) const { return barrier(4, at.stage); }
  __device__ AsyncBarrier value_empty(Position at) const { return barrier(5, at.stage); }
  __device__ AsyncBarrier landed_full(Position at) const {
    return Shape::transposes ? barrier(6, at.stage) : value_full(at);
  }
  __device__ AsyncBarrier landed_empty(Position at) const {
    return Shape::transposes ? barrier(7, at.stage) : value_empty(at);
  }
  // Beside these, which only FP8 has, there is no bias.
  __device__ AsyncBarrier bias_full(BiasPosition at) const { return barrier(6, at.stage); }
  __device__ AsyncBarrier bias_empty(BiasPosition at) const { return barrier(7, at.stage); }

  // Nor with either of these varlen, whose query tiles are passed on.
  static_assert(!config.varlen || !(config.bias || Shape::transposes));
  __device__ AsyncBarrier dealt_full(DealtPosition at) const { return barrier(6, at.stage); }
  __device__ AsyncBarrier dealt_empty(DealtPosition at) const { return barrier(7, at.stage); }
  /// 16 bytes, behind the barriers that there are.
  __device__ unsigned dealt(DealtPosition at) const { return barrier(6, 2 + 2 * at.stage).address; }

  /// By all threads of the block.
  __device__ void initialise() const {
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < config.query_tiles; ++stage) {
        const QueryPosition at = {stage};
        query_full(at).initialise(1);
        query_empty(at).initialise(consumer_warps);
      }
      for (int stage = 0; stage < config.stages; ++stage) {
        const Position at = {stage};
        key_full(at).initialise(1);
        key_empty(at).initialise(consumer_warps);
        value_full(at).initialise(Shape::transposes ? transposing_warps : 1);
        value_empty(at).initialise(consumer_warps);
        if constexpr (Shape::transposes) {
          landed_full(at).initialise(1);
          landed_empty(at).initialise(transposing_warps);
        }
      }
      for (int stage = 0; config.varlen && stage < 2; ++stage) {
        const DealtPosition at = {stage};
        dealt_full(at).initialise(1);
        dealt_empty(at).initialise(consumer_warps + 1);  // and the producer
      }
      for (int stage = 0; stage < config.bias_stages; ++stage) {
        if constexpr (config.bias) {
          const BiasPosition at = {stage};
          bias_full(at).initialise(1);
          bias_empty(at).initialise(consumer_warps);
        }
      }
      publish_barriers();
    }
    __syncthreads();
  }

 private:
  __device__ AsyncBarrier barrier(int kind, int stage) const {
    return {shared + 64 * kind + 8 * stage};
  }
};

}  // namespace cupyflash
