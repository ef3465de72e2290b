// What the kernels of a key-value cache are compiled for. One to one with
// cupyflash/_cuda/config_decode.py.
#pragma once

#include "common/types.cuh"

namespace cupyflash {

/// Attention of few queries to a cache. A row is a query of one head; the rows of a group's heads
/// share keys and values, so that a tile of 16 rows is full sooner.
struct DecodeConfig {
  DataType dtype;     // float16 or bfloat16
  DataType kv_dtype;  // of the cache: the same, or FP8
  int head_dim;       // of q and k, padded to rows of whole 64 bytes in the cache
  int head_dim_v;     // of v and out, padded likewise
  int row_warps;      // each has 16 rows of its own
  int key_warps;      // each has keys of its own
  int warp_keys;      // keys of a step
  int stages;         // steps in shared memory
  int kept_steps;     // times 16 columns of the queries stay in registers, others are read again
  int load_width;     // elements that one load of queries moves
  int cache_width;    // and one load of the cache
  int store_width;    // elements that one store of out moves
  int page_size;      // tokens; 0: an entry lies in one piece
  bool raw_scores;    // score = softmax_scale * (q . k), softmax_scale > 0, is left to the exponent
  bool window;        // causal, or a window bound on either side
  bool softcap;
  bool alibi;
  bool sinks;
  bool exact_softcap;  // by the library's tanh
  bool split;          // several blocks share an entry's keys: `combine` writes the output

  // What `score` asks for, and a cache has not.
  static constexpr bool bias = false;
  static constexpr bool score_mod = false;
  static constexpr DataType bias_dtype = DataType::float32;

  __device__ constexpr bool folded_cap() const { return false; }  // see config_mma.cuh
  __device__ constexpr bool float8_keys() const { return is_float8(kv_dtype); }
  __device__ constexpr int warps() const { return row_warps * key_warps; }
  __device__ constexpr int threads() const { return 32 * warps(); }
  __device__ constexpr int rows() const { return 16 * row_warps; }
  __device__ constexpr int keys() const { return warp_keys * key_warps; }  // of a block's step
};

/// Writing new tokens into a cache, and turning them and the queries to their positions.
struct AppendConfig {
  DataType dtype;         // of new tokens
  DataType kv_dtype;      // of the cache: the same, or FP8, to which they are then rounded
  DataType rotary_dtype;  // of cosines and sines
  int width;              // elements that one access moves where nothing is turned
  int page_size;          // as above
  bool rotary;
  bool interleaved;  // elements 2 i and 2 i + 1 are a pair; else i and i + pairs

  __device__ constexpr bool quantizes() const { return dtype != kv_dtype; }
};

}  // namespace cupyflash
