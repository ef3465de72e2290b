// The thread that has the copy engine add dQ's tiles to the float32 sums in global memory.
#pragma once

#include "arch/bulk.cuh"
#include "arch/reduce.cuh"
#include "attention/query_sums.cuh"
#include "backward/pipeline_wgmma.cuh"
#include "backward/walk_wgmma.cuh"

namespace cupyflash {

template <WgmmaBackwardConfig config>
struct BackwardReducer {
  using Shape = WgmmaBackwardShape<config>;

  const WgmmaBackwardParams& params;
  BackwardPipeline<config> pipeline;

  __device__ void run() const {
    if constexpr (config.deterministic) return run_in_turns();
    unsigned round = 0;
    visit_query_tiles<config>(params, [&](const BackwardWalk<config>& walk) {
      add(walk, round);
      round ^= 1;
    });
    await_bulk_additions();  // shared memory lives as long as the block
  }

 private:
  /// Ends each turn when the sums have arrived; consumers do not wait for that. Unrolled, it would
  /// need more registers than there are.
  __device__ void run_in_turns() const {
    unsigned round = 0;
    BackwardWalk<config> walk(params, first_place<config>(params));
#pragma unroll 1
    for (; walk.exists(); walk.advance(), round ^= 1) {
      add(walk, round);
      await_bulk_additions();
      end_turn(walk.turns(params));
    }
  }

  __device__ void add(const BackwardWalk<config>& walk, unsigned round) const {
    const int64 pair = walk.pair(params);
    pipeline.sums_full().wait(round);
    publish_shared();  // here, as consumers would wait for their writes to arrive
    if constexpr (config.deterministic) pipeline.turn().wait(round);
    add_bulk(params.sums_of(pair, walk.first_query(), config.sum_dim()), pipeline.sums(),
             Shape::sums_bytes);
    await_bulk_reads();
    pipeline.sums_empty().arrive();
  }
};

/// The same for the panels of one role, `first` ... `end` - 1.
template <WgmmaBackwardConfig config>
struct BackwardPanelReducer {
  using Shape = WgmmaBackwardShape<config>;
  static constexpr int rows = 8;  // whose sums of a panel lie together
  static_assert(!config.deterministic, "with roles consumers add in their turns");

  const WgmmaBackwardParams& params;
  BackwardPipeline<config> pipeline;
  int role, first, end;

  __device__ void run() const {
    unsigned round = 0;
    visit_query_tiles<config>(params, [&](const BackwardWalk<config>& walk) {
#pragma unroll 1
      for (int panel = first; panel < end; ++panel, round ^= 1) add(walk, panel, round);
    });
    await_bulk_additions();  // shared memory lives as long as the block
  }

 private:
  __device__ void add(const BackwardWalk<config>& walk, int panel, unsigned round) const {
    constexpr int sum_dim = config.sum_dim(), bytes = Shape::panel_bytes / config.block_m * rows;
    float* const target = params.sums_of(walk.pair(params), walk.first_query(), sum_dim) +
                          QuerySums<sum_dim>::offset(64 * panel);
    pipeline.sums_full(role).wait(round);
    publish_shared();
#pragma unroll 1
    for (int part = 0; part < config.block_m / rows; ++part) {
      add_bulk(target + part * rows * sum_dim, pipeline.sums(role) + part * bytes, bytes);
    }
    await_bulk_reads();
    pipeline.sums_empty(role).arrive();
  }
};

}  // namespace cupyflash
