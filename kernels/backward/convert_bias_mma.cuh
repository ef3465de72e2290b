// From float32 sums in tiles to the gradient of a bias, in its own dtype and shape.
#pragma once

#include "backward/bias_gradient_mma.cuh"
#include "backward/prepare_mma.cuh"

namespace cupyflash {

/// A block takes a tile, a warp the part that a warp has added to, by way of shared memory.
template <MmaBackwardConfig config>
__device__ void convert_bias_gradient(const MmaBackwardParams& params) {
  using Shape = MmaBackwardShape<config>;
  constexpr int keys = Shape::warp_keys, queries = Shape::warp_queries;
  constexpr int pitch = keys + 4;  // the lanes of a piece write to different banks
  __shared__ float staged[config.warps()][queries * pitch];
  const BackwardParams& common = params.common;
  const BiasSums<config> sums(common);
  const int n = blockIdx.x % sums.key_tiles, rest = blockIdx.x / sums.key_tiles;
  const int m = rest % sums.query_tiles, plane = rest / sums.query_tiles;
  const float* source = sums.part(plane, m, n);
  float* mine = staged[Shape::warp()];
#pragma unroll
  for (int i = 0; i < Shape::m_tiles; ++i) {
#pragma unroll
    for (int j = 0; j < Shape::n_tiles; ++j) {
      const float4 four = *reinterpret_cast<const float4*>(source + sums.piece(i, j));
      float* upper = mine + (j * 8 + MmaLane::col()) * pitch + i * 16 + MmaLane::row();
      upper[0] = four.x;
      upper[pitch] = four.y;
      upper[8] = four.z;
      upper[pitch + 8] = four.w;
    }
  }
  __syncwarp();
  const BiasGradient<config> gradient(common, plane,
                                      gradient_factor<config>(common.attention, 1.0f));
  const int first_query = m * config.block_m + Shape::query_warp() * queries;
  const int first_key = n * config.block_n + Shape::key_row();
#pragma unroll 4
  for (int at = MmaLane::lane(); at < queries * keys; at += 32) {
    const int query = at / keys, key = at % keys;
    gradient.put(first_query + query, first_key + key, mine[query * pitch + key] * gradient.factor);
  }
}

}  // namespace cupyflash
