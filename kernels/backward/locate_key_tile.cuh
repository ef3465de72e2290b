// Which key tile a thread block of a tensor-core backward takes.
#pragma once

#include "attention/tile_order.cuh"

namespace cupyflash {

/// The key tile of thread block `block`.
template <auto config>
__device__ TileIndex locate_key_tile(const BackwardParams& params, int block) {
  const Attention& attention = params.attention;
  const int heads = attention.num_heads / attention.group_size;
  int index = block;
  if constexpr (config.window && !config.varlen) {
    // Beside q and grad_out, their gradients' float32 sums pass.
    const int dim = 3 * config.head_dim + config.head_dim_v;
    index =
        grouped_order(index, ceil_div(attention.seqlen_k, config.block_n), heads * attention.batch,
                      heads_in_cache(attention.seqlen_q, dim * attention.group_size));
  }
  return locate_tile<config.varlen, config.window, true, config.block_n>(params, index, heads);
}

}  // namespace cupyflash
