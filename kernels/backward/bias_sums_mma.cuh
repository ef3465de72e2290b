// In which order the float32 sums lie in memory for the gradient of a bias that sequences or heads
// share: as the warps that add to them hold them, so that a warp adds to 512 bytes in a row.
#pragma once

#include "attention/sequence.cuh"
#include "backward/shape_mma.cuh"

namespace cupyflash {

/// (planes of the bias, query tiles, key tiles, warps, pieces of a warp, 32 lanes, 4).
template <MmaBackwardConfig config>
struct BiasSums {
  using Shape = MmaBackwardShape<config>;
  static constexpr int warp_size = Shape::m_tiles * Shape::n_tiles * 128;
  static constexpr int tile_size = config.warps() * warp_size;

  float* sums;
  int query_tiles;
  int key_tiles;

  __device__ explicit BiasSums(const BackwardParams& params)
      : sums(params.bias_sums),
        query_tiles(ceil_div(params.attention.seqlen_q, config.block_m)),
        key_tiles(ceil_div(params.attention.seqlen_k, config.block_n)) {}

  /// A lane's sums of its warp's first piece.
  __device__ float* part(int64 plane, int m, int n) const {
    return sums + ((plane * query_tiles + m) * key_tiles + n) * tile_size +
           int(Shape::warp()) * warp_size + MmaLane::lane() * 4;
  }
  /// From there to another piece.
  __device__ static constexpr int piece(int i, int j) { return (i * Shape::n_tiles + j) * 128; }
};

}  // namespace cupyflash
