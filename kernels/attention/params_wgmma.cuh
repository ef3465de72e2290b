// What the Hopper kernels are told beyond ForwardParams and BackwardParams. Mirrored by
// cupyflash/_cuda/config_wgmma.py.
#pragma once

#include "arch/tma.cuh"
#include "attention/params_mma.cuh"

namespace cupyflash {

/// A query tile, and where the table has the one that the same thread block takes next: -1, none.
/// The first `gridDim.x` places are those that blocks start with.
struct alignas(16) QueryTilePlace {
  int first_row;  // negative: no tile
  int head;
  int batch;
  int next;
};

struct WgmmaForwardParams {
  ForwardParams common;
  const QueryTilePlace* places;  // see tile_order.py
  int first_key;                 // that any query sees: row 0 of the maps of key and value
  float exponent_factor;         // from what the products are to exponents of 2
  TensorMap query_map;           // (b, h, sq, d)
  TensorMap key_map;             // (b, hk, keys that are seen, d)
  TensorMap value_map;           // (b, hk, keys that are seen, dv)
  TensorMap out_map;             // (b, h, sq, dv), if `staged`
  TensorMap bias_map;            // (b or 1, h or 1, sq, sk), if there is one
};

/// Scratch memory is that of the mma engine but for `statistics`, (b, h, 2, rows): the exponent of
/// 2 that a row's scores are divided by, (m + log l) * log2(e), and D. Rows without keys, and rows
/// past the end, have inf and 0.
struct WgmmaBackwardParams : MmaBackwardParams {
  const int* order;        // of key tiles: tile_order.py; persistent with windows, but whole heads
  int first_query;         // that sees any key: row 0 of the maps of query and grad_out
  int first_key;           // that any query sees: row 0 of the maps of key and value
  float exponent_factor;   // from scores, or products, to exponents of 2
  TensorMap query_map;     // (b, h, queries that see, d)
  TensorMap key_map;       // (b, hk, keys that are seen, d)
  TensorMap value_map;     // (b, hk, keys that are seen, dv)
  TensorMap grad_out_map;  // (b, h, queries that see, dv)

  /// First of dq's float32 sums of a tile of a head's rows, as in QuerySums. `pair` is the number
  /// of the (batch, head) pair; with whole heads of (block, head of the group).
  __device__ float* sums_of(int64 pair, int first_row, int sum_dim) const {
    return query_sums + (pair * rows + first_row) * sum_dim;
  }
  __device__ const float* shifts_of(int64 pair) const { return statistics + 2 * pair * rows; }
  __device__ const float* deltas_of(int64 pair) const { return shifts_of(pair) + rows; }
};

}  // namespace cupyflash
