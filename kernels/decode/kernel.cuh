// Attention of few queries to a cache: one thread block a (split of the keys, tile of rows, head of
// keys, entry).
#pragma once

#include "decode/append.cuh"
#include "decode/combine.cuh"
#include "decode/merge.cuh"

namespace cupyflash {

template <DecodeConfig config>
__device__ void decode(const CacheParams& params) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  constexpr float log2e = 1.4426950408889634f;
  const Attention& attention = params.attention;
  const int heads_kv = attention.num_heads / attention.group_size;
  const int rows = attention.seqlen_q * attention.group_size;
  const int tiles = ceil_div(rows, config.rows());
  // Neighbours share keys (tiles), then an entry.
  const int tile = blockIdx.x % tiles, others = blockIdx.x / tiles;
  const int split = others % params.num_splits, pair = others / params.num_splits;
  const int head_kv = pair % heads_kv;
  const CacheEntry entry(params, pair / heads_kv);
  const bool first = tile == 0 && split == 0 && head_kv == 0 && threadIdx.x == 0;
  if (first && !entry.as_given) params.faults[1] = 1;

  const RowTile row_tile = {tile * config.rows(), rows, attention.group_size};
  const DecodeMainloop<config> mainloop(params, entry, head_kv, row_tile,
                                        shared_address(shared_memory));
  const Range steps = SplitOf(params, mainloop.seen(), config.keys()).steps_of(split);
  if (config.split && steps.begin >= steps.end) return;  // `combine` knows

  const double scale = config.raw_scores ? attention.softmax_scale : 1.0;
  DecodeState<config> state{typename DecodeShape<config>::Softmax(float(scale * log2e))};
  mainloop.run(state, steps);
  DecodeMerge<config>(params, entry, head_kv, row_tile, reinterpret_cast<float*>(shared_memory))
      .write(state, split);
}

}  // namespace cupyflash
