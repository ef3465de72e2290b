// The thread that asks the copy engine for tiles, as far ahead of the consumers as there is memory.
#pragma once

#include "arch/bulk.cuh"
#include "backward/pipeline_wgmma.cuh"
#include "backward/walk_wgmma.cuh"

namespace cupyflash {

template <WgmmaBackwardConfig config>
struct BackwardProducer {
  using Pipeline = BackwardPipeline<config>;
  using Shape = typename Pipeline::Shape;
  using QueryPosition = typename Pipeline::QueryPosition;
  using GradOutPosition = typename Pipeline::GradOutPosition;

  const WgmmaBackwardParams& params;
  Pipeline pipeline;

  /// For each key tile in the order of use: K, Q(0), V, dO(0), Q(1), dO(1), ... If it is not a
  /// block's only one, K after dO(0): K's memory is the last to become free.
  __device__ void run() const {
    prefetch_map(params.key_map);
    prefetch_map(params.query_map);
    prefetch_map(params.value_map);
    prefetch_map(params.grad_out_map);
    unsigned count = 0, keys = 0;  // query tiles, and key tiles with any, before these
    int place = first_place<config>(params);
    for (; place >= 0; place = next_place<config>(params, place)) {
      BackwardWalk<config> walk(params, place);
      if (!walk.exists()) continue;
      if (!config.persistent) load_key(walk, keys);
      for (bool first = true; walk.exists(); walk.advance(), ++count, first = false) {
        load_query(walk, QueryPosition::after(count));
        if (first) load_value(walk, keys);
        load_grad_out(walk, GradOutPosition::after(count));
        if (first && config.persistent) load_key(walk, keys);
      }
      ++keys;
    }
  }

 private:
  __device__ int key_row(const BackwardWalk<config>& walk) const {
    return walk.tile.first_row - params.first_key;
  }

  __device__ void load_key(const BackwardWalk<config>& walk, unsigned keys) const {
    if constexpr (config.persistent) pipeline.key_empty().wait((keys & 1) ^ 1);
    pipeline.key().load(params.key_map, key_row(walk), walk.tile.head, walk.tile.sequence.batch,
                        pipeline.key_full());
  }

  __device__ void load_value(const BackwardWalk<config>& walk, unsigned keys) const {
    if constexpr (config.persistent) pipeline.value_empty().wait((keys & 1) ^ 1);
    pipeline.value().load(params.value_map, key_row(walk), walk.tile.head, walk.tile.sequence.batch,
                          pipeline.value_full());
  }

  __device__ int row(const BackwardWalk<config>& walk) const {
    return walk.first_query() - params.first_query;
  }

  /// With its statistics.
  __device__ void load_query(const BackwardWalk<config>& walk, QueryPosition at) const {
    const AsyncBarrier full = pipeline.query_full(at);
    pipeline.query_empty(at).wait(at.round ^ 1);
    const float* shifts = params.shifts_of(walk.pair(params)) + walk.first_query();
    constexpr int bytes = 4 * config.block_m;
    full.arrive_and_expect(Shape::QueryTile::bytes + 2 * bytes);
    pipeline.query(at).copy(params.query_map, row(walk), walk.head, walk.tile.sequence.batch, full);
    copy_bulk(pipeline.shifts(at), shifts, bytes, full);
    copy_bulk(pipeline.deltas(at), shifts + params.rows, bytes, full);
  }

  __device__ void load_grad_out(const BackwardWalk<config>& walk, GradOutPosition at) const {
    pipeline.grad_out_empty(at).wait(at.round ^ 1);
    pipeline.grad_out(at).load(params.grad_out_map, row(walk), walk.head, walk.tile.sequence.batch,
                               pipeline.grad_out_full(at));
  }
};

}  // namespace cupyflash
