// What a kernel is compiled for. One to one with the dataclasses of cupyflash/_cuda/plan.py.
#pragma once

#include "common/types.cuh"

namespace cupyflash {

struct ForwardConfig {
  DataType dtype;      // of q
  DataType kv_dtype;   // of k and v: the same, or FP8 where q is 16-bit
  DataType out_dtype;  // of out
  int head_dim;        // of q and k, padded to a multiple of 32
  int head_dim_v;      // of v and out, padded likewise
  int block_m;         // queries of a tile
  int block_n;         // keys of a tile
  int warps;
  int load_width;   // elements that one load from global memory moves
  int store_width;  // elements that one store moves
  bool async_copy;  // cp.async; needs sm_80 and no conversion
  bool window;      // causal, or a window bound on either side
  bool softcap;
  bool alibi;
  bool sinks;
  bool varlen;
  int masks;  // 0 to 2: the call's mask, the block mask's inner one
  bool block_mask;
  bool visibility;  // a map says which tiles are hidden
  bool bias;
  DataType bias_dtype;
  bool dropout;
  bool score_mod;

  __device__ constexpr int threads() const { return 32 * warps; }
  __device__ constexpr bool float8_keys() const { return is_float8(kv_dtype); }

  /// Whether scores are hidden that no band hides: what they belong to may hold NaN.
  __device__ constexpr bool hides() const { return masks > 0 || block_mask || bias || score_mod; }
};

/// One of the backward's kernels: they share all but the tile sizes.
struct BackwardConfig {
  DataType dtype;
  int head_dim;
  int head_dim_v;
  int block_m;
  int block_n;
  int warps;
  int load_width;
  int store_width;
  bool async_copy;
  bool window;
  bool softcap;
  bool alibi;
  bool varlen;
  int masks;  // 0 to 2: the call's mask, the block mask's inner one
  bool block_mask;
  bool visibility;  // a map says which tiles are hidden
  bool bias;
  DataType bias_dtype;
  bool dropout;
  bool score_mod;
  bool exact_sums;  // gradients of a score_mod's arrays do not depend on the order of blocks

  __device__ constexpr int threads() const { return 32 * warps; }
  __device__ constexpr bool float8_keys() const { return false; }

  /// Whether scores are hidden that no band hides: what they belong to may hold NaN.
  __device__ constexpr bool hides() const { return masks > 0 || block_mask || bias || score_mod; }
};

}  // namespace cupyflash
