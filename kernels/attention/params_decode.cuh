// What the kernels of a key-value cache are told at run time. Mirrored by
// cupyflash/_cuda/config_decode.py.
#pragma once

#include "attention/params.cuh"

namespace cupyflash {

/// A cache is (blocks, block_size, hk, d): a block is the whole cache of an entry, or a page. Its
/// strides call blocks `batch` and tokens `row`.
struct CacheParams {
  const void* query;    // (b, sq, h, d), as given
  void* attended;       // the same as attended to: `query` itself, or its turned copy
  void* key;            // cache of keys
  void* value;          // cache of values
  const void* new_key;  // (b, new_tokens, hk, d)
  const void* new_value;
  void* out;           // (b, sq, h, dv)
  float* lse;          // (b, h, sq), dense; null: not wanted
  const int* lengths;  // (b,), tokens before the append; null: `length` of all
  const int* leftpad;  // (b,), first position that is seen; null: 0
  const int* blocks;   // (b,) or (b, pages): blocks of each entry; null: entry e has block e
  const void* cos;     // (rotary_rows, rotary_pairs)
  const void* sin;
  const float* alibi_slopes;  // (1 or b, h)
  const float* sinks;         // (h,)
  const float* key_descale;   // (1 or b, hk), FP8 only; null: 1
  const float* value_descale;
  float* partial_sums;        // (b, hk, rows, splits, padded dv): unnormalised outputs
  float* partial_statistics;  // (b, hk, rows, splits, 2): exponents of 2 that they are relative to,
                              // sums of probabilities
  int* faults;                // tokens dropped; whether something was clamped
  int64 length;
  Strides query_strides;
  Strides attended_strides;
  Strides key_strides;
  Strides value_strides;
  Strides new_key_strides;
  Strides new_value_strides;
  Strides out_strides;
  int64 lengths_stride;
  int64 leftpad_stride;
  int64 blocks_stride;       // from entry to entry
  int64 blocks_page_stride;  // from page to page
  int64 cos_strides[2];
  int64 sin_strides[2];
  DescaleStrides key_descale_strides;
  DescaleStrides value_descale_strides;
  double key_scale;    // times key_descale: what the cache's keys are to be multiplied by, of which
                       // softmax_scale has key_scale already
  double value_scale;  // likewise, of values
  Attention attention;  // seqlen_k: capacity of an entry
  int num_blocks;
  int new_tokens;
  int rotary_rows;
  int rotary_pairs;
  int turns_each_query;  // to its own position; else all to that of the first
  int num_splits;
  int split_keys;  // of every split, wherever an entry ends; 0: an entry is cut evenly
};

}  // namespace cupyflash
