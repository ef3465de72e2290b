// The query rows of a warp of the Hopper forward, in registers or in shared memory.
#pragma once

#include "forward/pipeline_wgmma.cuh"

namespace cupyflash {

template <WgmmaForwardConfig config>
struct WarpQueries {
  using Pipeline = ForwardPipeline<config>;
  static constexpr bool kept = config.query_in_registers;
  static constexpr int steps = config.head_dim * config.itemsize() / 32;  // of 32 bytes

  unsigned at[kept ? steps : 1][4];
  typename Pipeline::QueryPosition place;

  __device__ void take(const Pipeline& pipeline, int warp_row) {
    pipeline.query_full(place).wait(place.round);
    if constexpr (kept) {
      unsigned all = 0;
#pragma unroll
      for (int step = 0; step < steps; ++step) {
        pipeline.query(place).read(at[step], warp_row, step);
        all |= at[step][0];
      }
      // Arriving does not wait for reads that are under way, and copies would overtake them; this
      // store does.
      pipeline.hold_back(all);
      leave(pipeline);
    }
  }
  /// 32 bytes number `step` of the warp's rows.
  __device__ void read(const Pipeline& pipeline, int warp_row, unsigned (&query)[4],
                       int step) const {
    if constexpr (kept) {
#pragma unroll
      for (int e = 0; e < 4; ++e) query[e] = at[step][e];
    } else {
      pipeline.query(place).read(query, warp_row, step);
    }
  }
  /// Nothing is read of the tile any more.
  __device__ void leave(const Pipeline& pipeline) {
    pipeline.release(pipeline.query_empty(place));
    place.advance();
  }
};

}  // namespace cupyflash
