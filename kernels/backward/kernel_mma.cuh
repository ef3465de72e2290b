// Backward on tensor cores in three launches: statistics, then one block a (key tile, key-value
// head, batch) for dk, dv and its share of dq, then the conversion of dq.
#pragma once

#include "arch/copy_async.cuh"
#include "arch/opaque.cuh"
#include "attention/visible_tiles.cuh"
#include "backward/convert_bias_mma.cuh"
#include "backward/locate_key_tile.cuh"
#include "backward/mainloop_mma.cuh"
#include "backward/prepare_mma.cuh"
#include "tile/store_swizzled.cuh"

namespace cupyflash {

/// Writes this warp's keys and columns of dk or dv, by way of a key or value tile.
template <MmaBackwardConfig config, class Tile, int m_tiles, int n_tiles, class Output>
__device__ void write_key_gradient(const GlobalRows<Output>& target, const TileIndex& index,
                                   const Tile& staging, const MmaFragment<m_tiles, n_tiles>& sums,
                                   float scale) {
  using Shape = MmaBackwardShape<config>;
  float factor[m_tiles][2];
#pragma unroll
  for (int i = 0; i < m_tiles; ++i) factor[i][0] = factor[i][1] = scale;
  stage_rows<config.dtype>(staging, Shape::key_row(), sums, factor,
                           Shape::query_warp() * n_tiles * 8);
  __syncthreads();
  constexpr int rows = config.block_n / config.key_warps / config.query_warps;
  const int row = warp_index() * rows;
  write_staged_rows<rows, config.store_width>(target, index.first_row + row,
                                              index.sequence.seqlen_k, staging, row);
}

template <MmaBackwardConfig config>
__device__ void backward_mma(const MmaBackwardParams& params) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  using Mainloop = MmaBackwardMainloop<config>;
  using Output = Element<config.dtype>;
  using Input = const Output;
  constexpr float log2e = 1.4426950408889634f;

  const BackwardParams& common = params.common;
  const Attention& attention = common.attention;
  const TileIndex tile = locate_key_tile<config>(common, blockIdx.x);
  const Sequence& sequence = tile.sequence;
  if (tile.first_row >= sequence.seqlen_k) return;
  const int batch = sequence.batch;
  const float scale = float(attention.softmax_scale);

  const Mainloop mainloop{{shared_address(shared_memory),
                           visible_band<config.window>(attention, sequence), tile.first_row,
                           config.raw_scores     ? scale * log2e
                           : config.folded_cap() ? 2.0f * float(attention.softcap) * log2e
                                                 : log2e}};
  mainloop.load_keys(head_rows<Input>(common.key, common.key_strides, batch, sequence.first_key,
                                      tile.head, attention.head_dim),
                     head_rows<Input>(common.value, common.value_strides, batch, sequence.first_key,
                                      tile.head, attention.head_dim_v));
  typename Mainloop::KeySums grad_key;
  typename Mainloop::ValueSums grad_value;
  grad_key.fill(0.0f);
  grad_value.fill(0.0f);
  for (int g = 0; g < attention.group_size; ++g) {
    const int head = tile.head * attention.group_size + g;
    const Score<config> score(common, sequence, head);
    const int64 scratch = params.scratch_row(sequence, head, config.varlen);
    mainloop.run(
        {{head_rows<Input>(common.query, common.query_strides, batch, sequence.first_query, head,
                           attention.head_dim)},
         {head_rows<Input>(common.grad_out, common.grad_out_strides, batch, sequence.first_query,
                           head, attention.head_dim_v)},
         params,
         scratch,
         params.first_turn(sequence, head, config.varlen, config.block_m),
         score,
         MmaScore<config>(score),
         ElementMask<config>(common, sequence, head),
         query_tile_states<config>(common, common.visibility, batch, head,
                                   tile.first_row / config.block_n),
         Dropout<config>(common, sequence, head),
         kept_share<config>(attention),
         BiasGradient<config>(common, sequence, head, gradient_factor<config>(attention, 1.0f)),
         batch,
         head},
        grad_key, grad_value);
  }
  copy_async_wait();  // all copies, also of a key tile that no query sees: its group is open
  __syncthreads();    // the tiles are no longer read
  // Found again, instead of being kept.
  const TileIndex place = locate_key_tile<config>(common, opaque(blockIdx.x));
  write_key_gradient<config>(
      head_rows<Output>(common.grad_key, common.grad_key_strides, place.sequence.batch,
                        place.sequence.first_key, place.head, attention.head_dim),
      place, mainloop.block.key_tile(), grad_key,
      gradient_factor<config>(attention, float(attention.softmax_scale)));
  write_key_gradient<config>(
      head_rows<Output>(common.grad_value, common.grad_value_strides, place.sequence.batch,
                        place.sequence.first_key, place.head, attention.head_dim_v),
      place, mainloop.block.value_tile(), grad_value,
      config.dropout ? float(attention.keep_factor) : 1.0f);
}

}  // namespace cupyflash
