// Forward, one thread block a (query tile, head, batch).
#pragma once

#include "forward/epilogue_simt.cuh"

namespace cupyflash {

template <ForwardConfig config>
__device__ void forward_simt(const ForwardParams& params) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  auto& storage = *reinterpret_cast<ForwardStorage<config>*>(shared_memory);
  using Key = const Element<config.kv_dtype>;  // and value
  using T = Accumulator<config.dtype>;

  const Attention& attention = params.attention;
  const TileIndex tile = locate_tile<config.varlen, config.window, false, config.block_m>(
      params, blockIdx.x, attention.num_heads);
  const Sequence& sequence = tile.sequence;
  if (tile.first_row >= sequence.seqlen_q) return;

  const int head_kv = tile.head / attention.group_size;
  const ForwardMainloop<config> mainloop{
      storage,
      head_rows<const Element<config.dtype>>(params.query, params.query_strides, sequence.batch,
                                             sequence.first_query, tile.head, attention.head_dim),
      head_rows<Key>(params.key, params.key_strides, sequence.batch, sequence.first_key, head_kv,
                     attention.head_dim),
      head_rows<Key>(params.value, params.value_strides, sequence.batch, sequence.first_key,
                     head_kv, attention.head_dim_v),
      visible_band<config.window>(attention, sequence),
      Score<config>(params, sequence, tile.head),
      ElementMask<config>(params, sequence, tile.head),
      Dropout<config>(params, sequence, tile.head),
      key_tile_states<config>(params, params.visibility, sequence.batch, tile.head,
                              tile.first_row / config.block_m),
      tile.first_row};
  ForwardState<config> state;
  mainloop.run(state);
  write_forward<config>(params, tile, state);
}

}  // namespace cupyflash
