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

  /// In the order of use: K, Q(0), V, dO(0), Q(1), dO(1), ...
  __device__ void run() const {
    BackwardWalk<config> walk(params);
    if (!walk.exists()) return;
    const int key_row = walk.tile.first_row - params.first_key;
    const int head = walk.tile.head, batch = walk.tile.sequence.batch;
    pipeline.key().load(params.key_map, key_row, head, batch, pipeline.key_full());
    for (unsigned count = 0; walk.exists(); walk.advance(), ++count) {
      load_query(walk, Pipeline::QueryPosition::after(count));
      if (count == 0) {
        pipeline.value().load(params.value_map, key_row, head, batch, pipeline.value_full());
      }
      load_grad_out(walk, Pipeline::GradOutPosition::after(count));
    }
  }

 private:
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
