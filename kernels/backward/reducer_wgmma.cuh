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
      int* const turns = walk.turns(params, pair);
      pipeline.sums_full().wait(round);
      if constexpr (config.deterministic) await_turn(turns, walk.own_turn());
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
};

}  // namespace cupyflash
