// Backward on Hopper in three launches: statistics, then one block a (key tile, key-value head,
// batch) for dk, dv and its share of dq, then the conversion of dq. Blocks that stay take several
// key tiles; those that take whole heads write dq.
#pragma once

#include "arch/registers.cuh"
#include "backward/mainloop_roles_wgmma.cuh"
#include "backward/mainloop_wgmma.cuh"
#include "backward/prepare_wgmma.cuh"
#include "backward/producer_wgmma.cuh"
#include "backward/reducer_wgmma.cuh"
#include "backward/turns_wgmma.cuh"
#include "tile/register_shares.cuh"

namespace cupyflash {

/// What consumer warp `warp` does.
template <WgmmaBackwardConfig config>
__device__ void consume(const WgmmaBackwardParams& params, const BackwardPipeline<config>& pipeline,
                        int warp) {
  if constexpr (config.roles) {
    const BackwardConsumer<config> consumer{params, pipeline, warp % 4 * 16};
    if (warp < 4) {
      BackwardValueRole<config>{{consumer}}.run();
    } else {
      BackwardKeyRole<config>{{consumer}}.run();
    }
  } else {
    BackwardMainloop<config>{{params, pipeline, warp * 16}}.run();
  }
}

/// What the threads do that have dQ added: one, or one a role.
template <WgmmaBackwardConfig config>
__device__ void reduce(const WgmmaBackwardParams& params,
                       const BackwardPipeline<config>& pipeline) {
  if constexpr (config.roles) {
    constexpr int panels = config.sum_dim() / 64, of_values = panels / 2;
    using Reducer = BackwardPanelReducer<config>;
    if (threadIdx.x == 32) Reducer{params, pipeline, 0, 0, of_values}.run();
    if (threadIdx.x == 64) Reducer{params, pipeline, 1, of_values, panels}.run();
  } else {
    if (threadIdx.x == 32) BackwardReducer<config>{params, pipeline}.run();
  }
}

template <WgmmaBackwardConfig config>
__device__ void backward_wgmma(const WgmmaBackwardParams& params) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  using Shares = RegisterShares<config.consumers()>;
  const BackwardPipeline<config> pipeline{shared_address(shared_memory)};
  pipeline.initialise();
  const int warp = warp_index(), warpgroup = warp / 4;
  if (warpgroup == 0) {
    release_registers<Shares::producer>();
    if (threadIdx.x == 0) BackwardProducer<config>{params, pipeline}.run();
    if constexpr (!config.direct) reduce(params, pipeline);
    if constexpr (config.deterministic) {
      if (config.direct && threadIdx.x == 32) BackwardTurns<config>{params, pipeline}.end();
      if (threadIdx.x == 64) BackwardTurns<config>{params, pipeline}.announce();
    }
  } else {
    claim_registers<Shares::consumer>();
    consume<config>(params, pipeline, warp - 4);
  }
}

}  // namespace cupyflash
