// Varlen: query tiles are dealt to blocks as these ask for them, since only the device knows how
// long each takes. A thread of its own finds them and passes them on, two ahead: some consumers may
// be done with a tile while others wait for its last keys.
#pragma once

#include "arch/shared_memory.cuh"
#include "attention/sequence.cuh"
#include "forward/pipeline_wgmma.cuh"

namespace cupyflash {

template <WgmmaForwardConfig config>
class TileDealer {
 public:
  __device__ TileDealer(const WgmmaForwardParams& params, const ForwardPipeline<config>& pipeline)
      : params_(params.common), pipeline_(pipeline), number_(blockIdx.x) {}

  __device__ void run() {
    typename ForwardPipeline<config>::DealtPosition at;
    int first_row;
    do {
      const TileIndex tile = find();
      first_row = tile.first_row;
      pipeline_.dealt_empty(at).wait(at.round ^ 1);
      const unsigned slot = pipeline_.dealt(at);
      store_shared(slot, unsigned(first_row));
      store_shared(slot + 4, unsigned(tile.head));
      store_shared(slot + 8, unsigned(tile.sequence.batch));
      store_shared(slot + 12, 0u);
      pipeline_.dealt_full(at).arrive();
      at.advance();
    } while (first_row >= 0);
  }

 private:
  /// The next tile; in the end one with first_row = -1. Some of the numbers stand for none.
  __device__ TileIndex find() {
    const Attention& attention = params_.attention;
    const int slots = attention.seqlen_q / config.block_m + attention.batch + 1;
    TileIndex tile = {};
    tile.first_row = -1;
    while (number_ < slots * attention.num_heads) {
      tile = locate_tile<true, config.window, false, config.block_m>(params_, number_,
                                                                     attention.num_heads);
      // 0 at first, as blocks start with tiles of their own numbers.
      int* counter = reinterpret_cast<int*>(params_.visibility) + params_.scores.map_cols;
      number_ = gridDim.x + atomicAdd(counter, 1);
      if (tile.first_row < tile.sequence.seqlen_q) return tile;
      tile.first_row = -1;
    }
    return tile;
  }

  const ForwardParams& params_;
  const ForwardPipeline<config>& pipeline_;
  int number_;  // to be looked at next
};

/// What it passes on, to the producer's thread, which is `alone`, or a consumer's warp.
template <WgmmaForwardConfig config>
class DealtTiles {
 public:
  using Pipeline = ForwardPipeline<config>;

  __device__ DealtTiles(const Pipeline& pipeline, bool alone)
      : pipeline_(pipeline), alone_(alone) {}

  __device__ QueryTilePlace take() {
    pipeline_.dealt_full(at_).wait(at_.round);
    const uint4 words = load_shared(pipeline_.dealt(at_));
    const AsyncBarrier empty = pipeline_.dealt_empty(at_);
    at_.advance();
    if (alone_) {
      empty.arrive();
      return {int(words.x), int(words.y), int(words.z), 0};
    }
    pipeline_.release(empty);
    return {from_first_lane(words.x), from_first_lane(words.y), from_first_lane(words.z), 0};
  }

 private:
  /// All lanes have the same: now the compiler knows that too, and keeps it once a warp.
  __device__ static int from_first_lane(unsigned value) {
    return int(__shfl_sync(0xffffffffu, value, 0));
  }

  Pipeline pipeline_;
  bool alone_;
  typename Pipeline::DealtPosition at_;
};

/// Elsewhere a table has all tiles.
template <WgmmaForwardConfig config>
struct NothingDealt {
  __device__ NothingDealt(const ForwardPipeline<config>&, bool) {}
};

}  // namespace cupyflash
