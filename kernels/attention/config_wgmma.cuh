// What the Hopper kernels are compiled for. One to one with cupyflash/_cuda/config_wgmma.py.
#pragma once

#include "common/types.cuh"

namespace cupyflash {

struct WgmmaForwardConfig {
  DataType dtype;      // float16, bfloat16 or float8_e4m3fn
  DataType out_dtype;  // of out: float16 or bfloat16
  int head_dim;        // of q and k, padded to a multiple of 32
  int head_dim_v;      // of v and out, padded to 64, 96, 128, 192 or 256
  int block_m;         // queries of a tile: 64 a consumer warpgroup
  int block_n;         // keys of a tile
  int stages;          // key tiles, and value tiles, in shared memory
  int query_tiles;     // likewise
  int store_width;     // elements that one store moves
  int staged;          // columns of out that pass shared memory at a time, to the copy engine; or 0
  bool query_in_registers;
  bool shared_probabilities;  // P is an operand in shared memory, as is Q then
  bool joined;                // products of two query tiles overlap
  bool apart;                 // products of a group never overlap its exponentials
  bool sums_by_tile;  // each key tile's sums are added in float32: FP8 tensor cores round more
  bool turns;         // warpgroups issue their products one after the other
  bool eager;         // exponentials do not wait for the maxima; raw scores of 16 bits only
  bool raw_scores;    // the scale is left to the exponent
  bool window;        // causal, or a window bound on either side
  bool softcap;
  bool exact_softcap;  // by the library's tanh
  bool sinks;
  bool alibi;
  bool bias;
  DataType bias_dtype;  // of two bytes, if there is one
  int bias_stages;      // bias tiles in shared memory
  bool varlen;          // entries follow each other; only the device knows where they start

  // What this engine leaves to others.
  static constexpr bool score_mod = false;

  /// Whether key tiles may hold NaN that nobody sees: what a bias hides, or another entry's.
  __device__ constexpr bool meets_others() const { return bias || varlen; }
  /// Whether scores may be of any size: as in MmaForwardConfig, as is folded_cap.
  __device__ constexpr bool unbounded() const { return bias; }
  __device__ constexpr bool folded_cap() const { return false; }
  __device__ constexpr int itemsize() const { return is_float8(dtype) ? 1 : 2; }
  __device__ constexpr int consumers() const { return block_m / 64; }
  __device__ constexpr int threads() const { return 128 * (1 + consumers()); }
  __device__ constexpr bool float8_keys() const { return is_float8(dtype); }
};

struct WgmmaBackwardConfig {
  DataType dtype;
  int head_dim;  // padded to 64, 96, 128, 192 or 256, as is head_dim_v
  int head_dim_v;
  int block_m;          // queries of a tile, a multiple of 64
  int block_n;          // keys of a tile: 64 a consumer warpgroup; with roles 64
  int stages;           // query tiles in shared memory
  int grad_out_stages;  // and tiles of grad_out
  bool early;           // P^T is rounded with its exponentials, not when dS is formed
  bool roles;           // of two consumer warpgroups one makes dV, the other dK, of the same keys
  bool direct;          // dQ is added from registers, not by way of shared memory
  bool persistent;      // blocks stay, and take one key tile after another
  bool whole_heads;     // all of a head, in order: then only one block adds to its dQ
  int load_width;       // of what is loaded element by element: out and grad_out
  int store_width;
  bool raw_scores;
  bool window;
  bool softcap;
  bool exact_softcap;
  bool deterministic;  // blocks take turns to add to a query tile

  static constexpr DataType bias_dtype = DataType::float32;
  static constexpr bool bias = false;
  static constexpr bool alibi = false;
  static constexpr bool score_mod = false;
  static constexpr bool dropout = false;
  static constexpr bool varlen = false;

  __device__ constexpr int consumers() const { return roles ? 2 : block_n / 64; }
  __device__ constexpr int threads() const { return 128 * (1 + consumers()); }
  __device__ constexpr bool float8_keys() const { return false; }
  /// Whether turns go from the last keys to the first.
  __device__ constexpr bool descends() const { return deterministic && window; }
  /// Columns of dq's float32 sums: whole panels of shared memory.
  __device__ constexpr int sum_dim() const { return (head_dim + 63) / 64 * 64; }
  /// As in MmaBackwardConfig: here capped scores are formed.
  __device__ constexpr bool folded_cap() const { return false; }
};

}  // namespace cupyflash
