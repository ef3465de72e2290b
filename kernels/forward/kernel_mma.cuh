// Forward on tensor cores, one thread block a (query tile, head, batch).
#pragma once

#include "attention/tile_order.cuh"
#include "attention/visible_tiles.cuh"
#include "forward/epilogue_mma.cuh"
#include "forward/mainloop_turns_mma.cuh"

namespace cupyflash {

template <MmaForwardConfig config>
__device__ void forward_mma(const ForwardParams& params) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  using Input = const Element<config.dtype>;
  using Mainloop = MmaForwardMainloop<config>;
  constexpr double log2e = 1.4426950408889634;

  const Attention& attention = params.attention;
  int index = blockIdx.x;
  if constexpr (config.window && !config.varlen) {
    const int heads = heads_in_cache(attention.seqlen_k, config.head_dim + config.head_dim_v);
    index = grouped_order(index, ceil_div(attention.seqlen_q, config.block_m),
                          attention.num_heads * attention.batch, heads * attention.group_size);
  }
  const TileIndex tile = locate_tile<config.varlen, config.window, false, config.block_m>(
      params, index, attention.num_heads);
  const Sequence& sequence = tile.sequence;
  if (tile.first_row >= sequence.seqlen_q) return;

  const int head_kv = tile.head / attention.group_size;
  const unsigned shared = shared_address(shared_memory);
  const Score<config> score(params, sequence, tile.head);
  const Mainloop mainloop{shared,
                          {head_rows<Input>(params.query, params.query_strides, sequence.batch,
                                            sequence.first_query, tile.head, attention.head_dim)},
                          {head_rows<Input>(params.key, params.key_strides, sequence.batch,
                                            sequence.first_key, head_kv, attention.head_dim)},
                          {head_rows<Input>(params.value, params.value_strides, sequence.batch,
                                            sequence.first_key, head_kv, attention.head_dim_v)},
                          visible_band<config.window>(attention, sequence),
                          score,
                          MmaScore<config>(score),
                          ElementMask<config>(params, sequence, tile.head),
                          key_tile_states<config>(params, params.visibility, sequence.batch,
                                                  tile.head, tile.first_row / config.block_m),
                          Dropout<config>(params, sequence, tile.head),
                          tile.first_row};
  const double scale = config.raw_scores     ? attention.softmax_scale
                       : config.folded_cap() ? 2.0 * attention.softcap
                                             : 1.0;
  MmaForwardState<config> state{
      MmaSoftmax<Mainloop::m_tiles, config.unbounded()>(float(scale * log2e))};
  mainloop.run(state);
  write_forward_mma<config>(params, tile, shared, state);
}

}  // namespace cupyflash
