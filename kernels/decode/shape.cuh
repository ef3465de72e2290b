// How the warps of a decoding block share its work, and what lies where in shared memory.
#pragma once

#include "attention/config_decode.cuh"
#include "attention/softmax_mma.cuh"
#include "tile/multiply_float8.cuh"

namespace cupyflash {

template <DecodeConfig config>
struct DecodeShape {
  static constexpr bool float8 = config.float8_keys();
  static constexpr int itemsize = float8 ? 1 : 2;  // of the cache
  // Of P and V, as they are multiplied. float16 holds all of e4m3, and P to more bits than
  // bfloat16.
  static constexpr DataType value_dtype = float8 ? DataType::float16 : config.dtype;
  static constexpr int n_tiles = config.warp_keys / 8;
  static constexpr int steps = config.head_dim / 16;      // of S = Q K^T along head_dim
  static constexpr int steps_v = config.warp_keys / 16;   // of O += P V along the keys
  static constexpr int pairs_v = config.head_dim_v / 16;  // of column pieces of O
  static_assert(config.warp_keys % 16 == 0 && config.stages >= 2);

  using Scores = MmaFragment<1, n_tiles>;
  using Probabilities = MmaOperand<1, n_tiles>;
  using Sums = MmaFragment<1, config.head_dim_v / 8>;
  using Softmax = MmaSoftmax<1, false>;
  using QueryTile = SwizzledTile<config.rows(), config.head_dim>;
  using KeyTile = SwizzledTile<config.warp_keys, config.head_dim * itemsize / 2>;
  using ValueTile = SwizzledTile<config.warp_keys, config.head_dim_v * itemsize / 2>;

  // Shared memory: the queries; for each of the warps that share no keys, its stages of keys and
  // values; in the end, over all that, what these warps have found.
  static constexpr int stage_bytes = KeyTile::bytes + ValueTile::bytes;
  static constexpr int pipeline_bytes =
      QueryTile::bytes + config.key_warps * config.stages * stage_bytes;
  static constexpr int sums_pitch = config.head_dim_v + 8;  // floats; rows start in other banks
  static constexpr int statistics = 2 * config.key_warps * config.rows();
  static constexpr int merge_bytes =
      4 * (statistics + config.key_warps * config.rows() * sums_pitch);
  static constexpr int bytes = pipeline_bytes > merge_bytes ? pipeline_bytes : merge_bytes;

  /// Column of O that element e of piece j of the sums is of, e < 2.
  __device__ static int sums_column(int j, int e) {
    return float8 ? float8_column(j, e) : 8 * j + MmaLane::col() + e;
  }
};

/// What a warp knows of its rows.
template <DecodeConfig config>
struct DecodeState {
  typename DecodeShape<config>::Softmax softmax;
  typename DecodeShape<config>::Sums sums;
};

}  // namespace cupyflash
