// What a kernel is told at run time. Mirrored by cupyflash/_cuda/params.py; the stub asserts that
// both agree. Pointers come first: they alone change from call to call.
#pragma once

#include "common/types.cuh"

namespace cupyflash {

/// Distances in elements, any sign; columns are contiguous. Varlen arrays have batch = 0.
struct Strides {
  int64 batch;
  int64 row;
  int64 head;
};

/// An array that broadcasts over (b, h, sq, sk): distances in elements, any sign, 0 where it is
/// broadcast. Varlen: batch counts entries, rows and columns start with the entry.
struct ScoreStrides {
  int64 batch;
  int64 head;
  int64 row;
  int64 col;
  int rows;  // that exist, as nobody checks lengths on the device; broadcast: the largest int
  int cols;

  __device__ bool contains(int row_index, int col_index) const {
    return row_index < rows && col_index < cols;
  }
  __device__ int64 at(int row_index, int col_index) const {
    return row_index * row + col_index * col;
  }
};

/// The optional arrays of scores, and the map of which tiles they hide.
struct ScoreArrays {
  ScoreStrides mask;
  ScoreStrides inner_mask;
  ScoreStrides bias;
  ScoreStrides blocks;   // rows and columns are blocks
  int64 param_sizes[8];  // of a score_mod's arrays, in elements
  int block_rows;        // queries of one block of the block mask
  int block_cols;        // keys
  int map_batch;         // extents of all masks together: 1 where they all are broadcast
  int map_heads;
  int map_rows;
  int map_cols;  // of suspects: warpgroups
};

/// Lengths and options that the forward and the backward share.
struct Attention {
  double softmax_scale;
  double softcap;
  int64 alibi_batch_stride;
  int64 alibi_head_stride;
  int64 sinks_stride;
  double keep_factor;  // 1 / (1 - dropout_p)
  int batch;           // sequences, or varlen entries
  int seqlen_q;        // varlen: total_q
  int seqlen_k;        // varlen: total_k
  int num_heads;
  int group_size;  // query heads of one key-value head
  int head_dim;
  int head_dim_v;
  int window_left;             // open: the largest int
  int window_right;            // open: the largest int
  int top_left;                // whether query 0 is aligned with key 0, else the last with the last
  unsigned dropout_threshold;  // kept are random words from here on
};

/// Factors of heads, distances in elements; 0 where one serves all.
struct DescaleStrides {
  int64 batch;
  int64 head;
};

struct ForwardParams {
  const void* query;          // (b, sq, h, d); varlen (total_q, h, d)
  const void* key;            // (b, sk, hk, d)
  const void* value;          // (b, sk, hk, dv)
  void* out;                  // (b, sq, h, dv)
  void* row_max;              // (b, h, sq), accumulator type; null: not wanted
  void* row_sum;              // (b, h, sq); null: not wanted
  const int* cu_seqlens_q;    // (b + 1,)
  const int* cu_seqlens_k;    // (b + 1,)
  const float* alibi_slopes;  // (1 or b, h)
  const float* sinks;         // (h,)
  const uint8* mask;          // as ScoreArrays says, as are those that follow
  const uint8* inner_mask;    // a second one: the block mask's
  const void* bias;
  const uint8* blocks;
  uint8* visibility;           // states of tiles, see visible_tiles.cuh; of warps: suspects.cuh
  const uint64* seed_address;  // null: the seed is `seed`
  uint64 seed;
  const void* score_params[8];  // the named arrays of a score_mod
  const float* query_descale;   // (1 or b, hk), FP8 only; null: 1
  const float* key_descale;
  const float* value_descale;
  Strides query_strides;
  Strides key_strides;
  Strides value_strides;
  Strides out_strides;
  Strides row_max_strides;
  Strides row_sum_strides;
  Attention attention;
  ScoreArrays scores;
  DescaleStrides query_descale_strides;
  DescaleStrides key_descale_strides;
  DescaleStrides value_descale_strides;
  double value_scale;  // times value_descale: from sums of v's numbers to the output
};

struct BackwardParams {
  const void* query;
  const void* key;
  const void* value;
  const void* out;
  const void* grad_out;  // (b, sq, h, dv)
  const void* row_max;   // (b, h, sq), accumulator type, as all statistics
  const void* row_sum;
  const void* grad_lse;  // (b, h, sq); null: zero
  void* delta;           // (b, h, sq), scratch: rowsum(grad_out * out) - grad_lse
  void* grad_query;
  void* grad_key;
  void* grad_value;
  const int* cu_seqlens_q;
  const int* cu_seqlens_k;
  const float* alibi_slopes;
  const float* sinks;
  float* grad_sinks;  // (h,)
  const uint8* mask;
  const uint8* inner_mask;
  const void* bias;
  const uint8* blocks;
  uint8* visibility;
  uint8* key_visibility;  // for the tiles of the kernel of dk and dv, if it has its own
  const uint64* seed_address;
  uint64 seed;
  const void* score_params[8];
  void* grad_bias;             // accumulator type
  float* bias_sums;            // scratch: for its gradient, see bias_sums_mma.cuh
  void* grad_score_params[8];  // accumulator type; null: not wanted
  Strides query_strides;
  Strides key_strides;
  Strides value_strides;
  Strides out_strides;
  Strides grad_out_strides;
  Strides row_max_strides;
  Strides row_sum_strides;
  Strides grad_lse_strides;
  Strides delta_strides;
  Strides grad_query_strides;
  Strides grad_key_strides;
  Strides grad_value_strides;
  ScoreStrides grad_bias_strides;  // 0 where it is summed up
  int64 grad_sinks_stride;
  Attention attention;
  ScoreArrays scores;
};

}  // namespace cupyflash
