// What the tensor-core backward is told beyond BackwardParams: its scratch memory.
#pragma once

#include "attention/sequence.cuh"

namespace cupyflash {

/// Scratch rows are those of the queries; each (batch, head) has `rows` of them, at least
/// seqlen_q and then up to a multiple of block_m (varlen: one block_m more).
struct MmaBackwardParams {
  float* query_sums;  // (b, h, rows, padded head_dim), as in QuerySums: dq / softmax_scale
  float* statistics;  // (b, h, rows, 3): m * log2(e), 1 / l, D; unbounded scores: m
  int* turns;  // (b, h, tiles): key tiles that have added to a query tile; deterministic only
  BackwardParams common;
  int64 rows;
  int64 tiles;  // rows / block_m (varlen: and batch + 1 more)

  /// First scratch row of a sequence's head.
  __device__ int64 scratch_row(const Sequence& sequence, int head, bool varlen) const {
    return pair(sequence, head, varlen) * rows + sequence.first_query;
  }
  /// Turns of a sequence's first query tile.
  __device__ int* first_turn(const Sequence& sequence, int head, bool varlen, int block_m) const {
    const int tile = varlen ? sequence.first_query / block_m + sequence.batch : 0;
    return turns + pair(sequence, head, varlen) * tiles + tile;
  }

 private:
  __device__ int64 pair(const Sequence& sequence, int head, bool varlen) const {
    const int64 batch = varlen ? 0 : sequence.batch;
    return batch * common.attention.num_heads + head;
  }
};

}  // namespace cupyflash
