// Forward on Hopper, thread blocks that stay and walk over (query tile, head, batch).
#pragma once

#include "arch/registers.cuh"
#include "forward/mainloop_apart_wgmma.cuh"
#include "forward/producer_wgmma.cuh"
#include "forward/transposer_wgmma.cuh"
#include "tile/register_shares.cuh"

namespace cupyflash {

template <WgmmaForwardConfig config>
__device__ void forward_wgmma(const WgmmaForwardParams& params) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  using Shares = RegisterShares<config.consumers(), is_float8(config.dtype)>;
  const ForwardPipeline<config> pipeline{shared_address(shared_memory)};
  pipeline.initialise();
  const int warpgroup = warp_index() / 4;
  if (warpgroup == 0) {
    release_registers<Shares::producer>();
    if (threadIdx.x == 0) ForwardProducer<config>{params, pipeline}.run();
    if constexpr (config.varlen) {
      if (threadIdx.x == 32) TileDealer<config>(params, pipeline).run();
    }
    if constexpr (is_float8(config.dtype)) {
      if (warp_index() > 0) ForwardTransposer<config>{params, pipeline, warp_index() - 1}.run();
    }
  } else {
    claim_registers<Shares::consumer>();
    const int warp_row = (warp_index() - 4) * 16;
    ForwardConsumer<config>{params, pipeline, warpgroup - 1, warp_row}.run();
  }
}

}  // namespace cupyflash
