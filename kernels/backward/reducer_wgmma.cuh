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
    unsigned round = 0;
    int place = first_place<config>(params);
    for (; place >= 0; place = next_place<config>(params, place)) {
      for (BackwardWalk<config> walk(params, place); walk.exists(); walk.advance(), round ^= 1) {
        add(walk, round);
      }
    }
    await_bulk_additions();  // shared memory lives as long as the block
  }

 private:
  __device__ void add(const BackwardWalk<config>& walk, unsigned round) const {
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
};

}  // namespace cupyflash
