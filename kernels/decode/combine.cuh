// The splits of a row put together: one thread block a row. They come in the same order in every
// run, and those without keys do not take part.
#pragma once

#include "attention/cache_entry.cuh"
#include "attention/config_decode.cuh"
#include "decode/finish.cuh"
#include "tile/lanes.cuh"

namespace cupyflash {

constexpr int combine_warps = 4;  // share the splits of a row

/// Statistics of a row's splits together, the same in all lanes of every warp.
__device__ inline RowStatistics combined(const float* statistics, Range splits) {
  const int lane = threadIdx.x & 31;
  RowStatistics result = {MmaSoftmax<1, false>::none, 0.0f};
  for (int split = splits.begin + lane; split < splits.end; split += 32) {
    result.shift = fmaxf(result.shift, statistics[2 * split]);
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    result.shift = fmaxf(result.shift, __shfl_xor_sync(0xffffffffu, result.shift, lanes));
  }
  for (int split = splits.begin + lane; split < splits.end; split += 32) {
    result.sum = fmaf(statistics[2 * split + 1],
                      exp2_hardware(statistics[2 * split] - result.shift), result.sum);
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    result.sum += __shfl_xor_sync(0xffffffffu, result.sum, lanes);
  }
  return result;
}

template <DecodeConfig config>
__device__ void combine(const CacheParams& params) {
  constexpr int lane_cols = (config.head_dim_v + 127) / 128;  // times four
  extern __shared__ __align__(128) unsigned char shared_memory[];
  float* const parts = reinterpret_cast<float*>(shared_memory);  // (combine_warps, head_dim_v)
  const Attention& attention = params.attention;
  const int rows = attention.seqlen_q * attention.group_size;
  const int row = blockIdx.x % rows, pair = blockIdx.x / rows;
  const int heads_kv = attention.num_heads / attention.group_size;
  const int head = pair % heads_kv * attention.group_size + row % attention.group_size;
  const CacheEntry entry(params, pair / heads_kv);
  const RowTile tile = {row / config.rows() * config.rows(), rows, attention.group_size};
  const Range seen = CacheBand<config.window>(attention, entry)
                         .seen_by_any(tile.queries(tile.first_row, config.rows()));
  const Range splits = SplitOf(params, seen, config.keys()).splits();

  const int64 first = int64(blockIdx.x) * params.num_splits;
  const float* const statistics = params.partial_statistics + 2 * first;
  const float* const sums = params.partial_sums + first * config.head_dim_v;
  const RowStatistics both = combined(statistics, splits);

  const int lane = threadIdx.x & 31, warp = warp_index();
  float4 total[lane_cols] = {};
#pragma unroll 4
  for (int split = splits.begin + warp; split < splits.end; split += combine_warps) {
    const float weight = exp2_hardware(statistics[2 * split] - both.shift);
#pragma unroll
    for (int i = 0; i < lane_cols; ++i) {
      const int col = 4 * (lane + 32 * i);
      if (config.head_dim_v % 128 != 0 && col >= config.head_dim_v) break;
      const float4 part = *reinterpret_cast<const float4*>(sums + split * config.head_dim_v + col);
      total[i].x = fmaf(weight, part.x, total[i].x);
      total[i].y = fmaf(weight, part.y, total[i].y);
      total[i].z = fmaf(weight, part.z, total[i].z);
      total[i].w = fmaf(weight, part.w, total[i].w);
    }
  }
#pragma unroll
  for (int i = 0; i < lane_cols; ++i) {
    const int col = 4 * (lane + 32 * i);
    if (config.head_dim_v % 128 != 0 && col >= config.head_dim_v) break;
    *reinterpret_cast<float4*>(parts + warp * config.head_dim_v + col) = total[i];
  }
  __syncthreads();

  const RowResult result = finish_row<config>(params, entry, both, head);
  const int query = row / attention.group_size;
  const auto out = head_rows<Element<config.dtype>>(params.out, params.out_strides, entry.index, 0,
                                                    head, attention.head_dim_v);
  for (int col = threadIdx.x; col < out.dim; col += 32 * combine_warps) {
    float value = 0.0f;
#pragma unroll
    for (int part = 0; part < combine_warps; ++part) {
      value += parts[part * config.head_dim_v + col];
    }
    out.row(query)[col] = from_accumulator<Element<config.dtype>>(value * result.factor);
  }
  if (threadIdx.x == 0) write_lse(params, entry.index, head, query, result.lse);
}

}  // namespace cupyflash
