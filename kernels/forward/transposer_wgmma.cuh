// The warps beside the producer's, which transpose value tiles of bytes: wgmma reads these along
// the keys only.
#pragma once

#include "arch/bulk.cuh"
#include "forward/pipeline_wgmma.cuh"
#include "forward/walk_wgmma.cuh"
#include "tile/transpose_float8.cuh"

namespace cupyflash {

template <WgmmaForwardConfig config>
struct ForwardTransposer {
  using Pipeline = ForwardPipeline<config>;
  const WgmmaForwardParams& params;
  Pipeline pipeline;
  int warp;  // 0 ... Pipeline::transposing_warps - 1

  __device__ void run() const {
    ForwardWalk<config> walk(params, pipeline, {0, config.block_m});
    typename Pipeline::Position at;
    for (bool more = walk.next_query_tile(); more; more = walk.advance()) {
      pipeline.landed_full(at).wait(at.round);
      pipeline.value_empty(at).wait(at.round ^ 1);
      transpose_float8<Pipeline::transposing_warps>(pipeline.landed(at), pipeline.value(at), warp);
      publish_shared();
      __syncwarp();
      if ((threadIdx.x & 31) == 0) {
        pipeline.landed_empty(at).arrive();
        pipeline.value_full(at).arrive();
      }
      at.advance();
    }
  }
};

}  // namespace cupyflash
