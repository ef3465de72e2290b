// The thread that has the copy engine add dQ's tiles to the float32 sums in global memory.
#pragma once

#include "arch/bulk.cuh"
#include "arch/reduce.cuh"
#include "backward/pipeline_wgmma.cuh"
#include "backward/walk_wgmma.cuh"

namespace cupyflash {

template <WgmmaBackwardConfig config>
struct BackwardReducer {
  using Shape = WgmmaBackwardShape<config>;

  const WgmmaBackwardParams& params;
  BackwardPipeline<config> pipeline;

  __device__ void run() const {
    BackwardWalk<config> walk(params);
    for (unsigned round = 0; walk.exists(); walk.advance(), round ^= 1) {
      const int64 pair = walk.pair(params);
      int* const turns = params.turns + pair * params.tiles + walk.m;
      pipeline.sums_full().wait(round);
      if constexpr (config.deterministic) await_turn(turns, own_turn(walk));
      add_bulk(params.sums_of(pair, walk.first_query(), config.sum_dim()), pipeline.sums(),
               Shape::sums_bytes);
      if constexpr (config.deterministic) {
        await_bulk_additions();
        end_turn(turns);
      } else {
        await_bulk_reads();
      }
      pipeline.sums_empty().arrive();
    }
    await_bulk_additions();  // shared memory lives as long as the block
  }

 private:
  /// Key tiles before this one that see a query tile. Blocks start in the order of their key tiles,
  /// so the one waited for is running or done.
  __device__ static int own_turn(const BackwardWalk<config>& walk) {
    const Range queries = {walk.first_query(), walk.first_query() + config.block_m};
    const int first_key = walk.band.seen_by_any(queries).begin;
    return walk.tile.first_row / config.block_n - first_key / config.block_n;
  }
};

}  // namespace cupyflash
