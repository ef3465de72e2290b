// What the tensor-core kernels are compiled for. One to one with cupyflash/_cuda/plan_mma.py.
#pragma once

#include "common/types.cuh"

namespace cupyflash {

struct MmaForwardConfig {
  DataType dtype;   // float16 or bfloat16
  int head_dim;     // of q and k, padded to a multiple of 32
  int head_dim_v;   // of v and out, padded likewise
  int block_m;      // queries of a tile
  int block_n;      // keys of a tile
  int warps;        // each has block_m / warps rows of its own
  int load_width;   // elements that one load from global memory moves
  int store_width;  // elements that one store moves
  int kept_steps;   // times 16 columns of the query tile stay in registers, others are read again
  bool turns;       // two groups of warps multiply in turns: see forward/mainloop_turns_mma.cuh
  bool raw_scores;  // score = softmax_scale * (q . k), softmax_scale > 0, is left to the exponent
  bool window;
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
  int bias_width;      // elements that one load of the bias moves
  bool exact_softcap;  // by the library's tanh

  __device__ constexpr int threads() const { return 32 * warps; }
  __device__ constexpr bool float8_keys() const { return false; }

  /// Whether products are added to ALiBi's part, as nothing else comes between.
  __device__ constexpr bool alibi_first() const { return alibi && raw_scores; }

  /// Whether scores are hidden that no band hides: what they belong to may hold NaN.
  __device__ constexpr bool hides() const { return masks > 0 || block_mask || bias || score_mod; }
  /// Whether scores may be of any size: differences are then taken before they are multiplied, as
  /// a product is off by more than 1 for large ones.
  __device__ constexpr bool unbounded() const { return bias || score_mod; }
  /// Whether a capped score is left as what it is linear in: -1 / (1 + exp(2 x / softcap)), to be
  /// multiplied by 2 softcap and added to softcap.
  __device__ constexpr bool folded_cap() const {
    return softcap && !exact_softcap && !alibi && !bias && !score_mod;
  }
  /// Whether masks say element by element which scores are hidden.
  __device__ constexpr bool masked() const { return masks > 0 || block_mask; }
};

struct MmaBackwardConfig {
  DataType dtype;
  int head_dim;
  int head_dim_v;
  int block_m;      // queries of a tile
  int block_n;      // keys of a tile
  int key_warps;    // that share the keys of a tile
  int query_warps;  // that share its queries, and the columns of dk and dv
  int load_width;
  int store_width;
  bool raw_scores;
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
  int bias_width;
  bool exact_softcap;
  bool bias_rows;            // the bias has an axis of queries
  bool bias_cols;            // and one of keys
  bool bias_shared;          // several scores add to one element of its gradient
  bool bias_in_tiles;        // they do so in float32 tiles that lie as warps hold them
  DataType grad_bias_dtype;  // as the gradient is written, or added to: float32
  bool deterministic;        // blocks add to a query tile in the order of their keys

  __device__ constexpr int warps() const { return key_warps * query_warps; }
  __device__ constexpr int threads() const { return 32 * warps(); }
  __device__ constexpr bool float8_keys() const { return false; }
  /// Columns of dq's float32 sums.
  __device__ constexpr int sum_dim() const { return head_dim; }

  /// Whether scores are hidden that no band hides: what they belong to may hold NaN.
  __device__ constexpr bool hides() const { return masks > 0 || block_mask || bias || score_mod; }
  /// Whether scores may be of any size: differences are then taken before they are multiplied, as
  /// a product is off by more than 1 for large ones.
  __device__ constexpr bool unbounded() const { return bias || score_mod; }
  /// Whether a capped score is left as what it is linear in: -1 / (1 + exp(2 x / softcap)), to be
  /// multiplied by 2 softcap and added to softcap.
  __device__ constexpr bool folded_cap() const {
    return softcap && !exact_softcap && !alibi && !bias && !score_mod;
  }
  /// Whether masks say element by element which scores are hidden.
  __device__ constexpr bool masked() const { return masks > 0 || block_mask; }
};

}  // namespace cupyflash
