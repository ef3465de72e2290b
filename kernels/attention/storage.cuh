// Shared memory of each kernel. Python plans with the same sizes; the stub asserts it.
#pragma once

#include "attention/config.cuh"
#include "tile/shared_tile.cuh"

namespace cupyflash {

template <ForwardConfig config>
struct ForwardStorage {
  using T = Accumulator<config.dtype>;
  OperandTile<T, config.block_m, config.head_dim> query;
  OperandTile<T, config.block_n, config.head_dim> key;
  OperandTile<T, config.block_n, config.head_dim_v> value;
  ScoreTile<T, config.block_m, config.block_n> probabilities;  // each row private to a warp
};

/// Softmax statistics of the queries of a tile, ready to use.
template <class T, int block_m>
struct alignas(16) StatisticsTile {
  T shift[block_m];        // row_max, or 0 where there is none
  T inverse_sum[block_m];  // 1 / row_sum, or 0
  T delta[block_m];        // rowsum(grad_out * out) - grad_lse
};

template <BackwardConfig config>
struct KeyGradientStorage {
  using T = Accumulator<config.dtype>;
  OperandTile<T, config.block_m, config.head_dim> query;
  OperandTile<T, config.block_m, config.head_dim_v> grad_out;
  OperandTile<T, config.block_n, config.head_dim> key;
  OperandTile<T, config.block_n, config.head_dim_v> value;
  ScoreTile<T, config.block_n, config.block_m> transposed_scores;  // P^T, then dS^T
  StatisticsTile<T, config.block_m> statistics;
};

template <BackwardConfig config>
struct QueryGradientStorage {
  using T = Accumulator<config.dtype>;
  OperandTile<T, config.block_m, config.head_dim> query;
  OperandTile<T, config.block_m, config.head_dim_v> grad_out;
  OperandTile<T, config.block_n, config.head_dim> key;
  OperandTile<T, config.block_n, config.head_dim_v> value;
  ScoreTile<T, config.block_m, config.block_n> scores;  // dS
};

}  // namespace cupyflash
