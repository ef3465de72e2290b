// Boolean masks and block masks, element by element: what no band can say.
#pragma once

#include "attention/sequence.cuh"

namespace cupyflash {

/// One boolean array as one head of one sequence sees it.
struct MaskPlane {
  const uint8* first;  // row 0, column 0
  ScoreStrides strides;

  MaskPlane() = default;
  __device__ MaskPlane(const uint8* array, const ScoreStrides& given, const Sequence& sequence,
                       int head, int batches)
      : first(array + score_batch(sequence, batches) * given.batch + head * given.head),
        strides(given) {}

  __device__ bool at(int row, int col) const {
    return strides.contains(row, col) && first[strides.at(row, col)] != 0;
  }
};

/// All masks of one head of one sequence, ANDed.
template <auto config>
struct ElementMask {
  static constexpr bool given = config.masks > 0 || config.block_mask;
  static constexpr int count = config.masks > 0 ? config.masks : 1;

  MaskPlane masks[count];
  MaskPlane blocks;
  int block_rows;
  int block_cols;

  template <class Params>
  __device__ ElementMask(const Params& params, const Sequence& sequence, int head) {
    const ScoreArrays& scores = params.scores;
    const int batches = params.attention.batch;
    if constexpr (config.masks > 0) masks[0] = {params.mask, scores.mask, sequence, head, batches};
    if constexpr (config.masks > 1) {
      masks[1] = {params.inner_mask, scores.inner_mask, sequence, head, batches};
    }
    if constexpr (config.block_mask) {
      blocks = {params.blocks, scores.blocks, sequence, head, batches};
      block_rows = scores.block_rows;
      block_cols = scores.block_cols;
    }
  }

  /// Whether the query sees the key, as far as masks say; the indices may be past the ends.
  __device__ bool sees(int query_index, int key_index) const {
    bool seen = true;
#pragma unroll
    for (int m = 0; m < config.masks; ++m) seen = seen && masks[m].at(query_index, key_index);
    if constexpr (config.block_mask) {
      // Without a sign, which makes the divisions shorter.
      seen = seen && blocks.at(unsigned(query_index) / unsigned(block_rows),
                               unsigned(key_index) / unsigned(block_cols));
    }
    return seen;
  }
};

}  // namespace cupyflash
