// Gradient of the bias, one block a tile of the bias: it adds up, always in the same order, dS of
// all the scores that share the tile's elements, along whichever axes the bias is broadcast.
#pragma once

#include "backward/kernel_simt.cuh"

namespace cupyflash {

/// What a block owns, and what it adds up.
template <BackwardConfig config>
struct BiasTile {
  ScoreStrides strides;  // of the gradient, dense: 0 along broadcast axes only
  Range batches;
  Range heads;
  int row_tile;  // 0 if all rows are added up, and so for columns
  int col_tile;

  __device__ BiasTile(const BackwardParams& params, int index) : strides(params.grad_bias_strides) {
    const int row_tiles = sums_rows() ? 1 : ceil_div(strides.rows, config.block_m);
    const int col_tiles = sums_cols() ? 1 : ceil_div(strides.cols, config.block_n);
    const Attention& attention = params.attention;
    col_tile = index % col_tiles;
    row_tile = index / col_tiles % row_tiles;
    const int pair = index / col_tiles / row_tiles;
    const int head = strides.head == 0 ? 0 : pair % attention.num_heads;
    const int batch = strides.head == 0 ? pair : pair / attention.num_heads;
    heads = strides.head == 0 ? Range{0, attention.num_heads} : Range{head, head + 1};
    batches = strides.batch == 0 ? Range{0, attention.batch} : Range{batch, batch + 1};
  }

  __device__ bool sums_rows() const { return strides.row == 0; }
  __device__ bool sums_cols() const { return strides.col == 0; }

  __device__ Range rows_of(const Sequence& sequence) const {
    const int end = ceil_div(sequence.seqlen_q, config.block_m);
    return sums_rows() ? Range{0, end} : Range{row_tile, minimum(row_tile + 1, end)};
  }
  __device__ Range cols_among(const Range& tiles) const {
    if (sums_cols()) return tiles;
    return {maximum(tiles.begin, col_tile), minimum(tiles.end, col_tile + 1)};
  }
};

/// Adds up along broadcast rows and columns of the tile, and writes every element that it has.
template <BackwardConfig config, class Scores>
__device__ void write_bias_gradient(const BackwardParams& params, const BiasTile<config>& tile,
                                    QueryGradientStorage<config>& storage, const Scores& sums) {
  using Shape = typename QueryGradientMainloop<config>::Shape;
  using T = typename Shape::T;
  __syncthreads();  // the tile of scores is no longer read
#pragma unroll
  for (int i = 0; i < Shape::rows; ++i) {
    T* row = storage.scores.row(Shape::lane_row() + i * LaneGrid::rows);
    T total = T(0);
#pragma unroll
    for (int j = 0; j < Shape::cols; ++j) {
      total += sums.at[i][j];
      if (!tile.sums_cols()) row[LaneGrid::col() + j * LaneGrid::cols] = sums.at[i][j];
    }
    total = row_total(total);
    if (tile.sums_cols() && LaneGrid::col() == 0) row[0] = total;
  }
  __syncthreads();

  const ScoreStrides& strides = tile.strides;
  T* target = static_cast<T*>(params.grad_bias) + tile.batches.begin * strides.batch +
              tile.heads.begin * strides.head;
  const int rows = tile.sums_rows() ? 1 : config.block_m;
  const int cols = tile.sums_cols() ? 1 : config.block_n;
  const int added = tile.sums_rows() ? config.block_m : 1;
  for (int index = threadIdx.x; index < rows * cols; index += config.threads()) {
    const int row = index / cols, col = index % cols;
    const int bias_row = tile.row_tile * config.block_m + row;
    const int bias_col = tile.col_tile * config.block_n + col;
    if (!strides.contains(bias_row, bias_col)) continue;
    T total = T(0);
    for (int r = 0; r < added; ++r) total += storage.scores.row(row + r)[col];
    target[strides.at(bias_row, bias_col)] = total;
  }
}

template <BackwardConfig config>
__device__ void bias_gradient_simt(const BackwardParams& params) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  auto& storage = *reinterpret_cast<QueryGradientStorage<config>*>(shared_memory);
  using Shape = typename QueryGradientMainloop<config>::Shape;
  using T = typename Shape::T;

  const Attention& attention = params.attention;
  const BiasTile<config> tile(params, blockIdx.x);
  typename Shape::Scores sums;
  sums.fill(T(0));
  for (int batch = tile.batches.begin; batch < tile.batches.end; ++batch) {
    Sequence sequence = {batch, 0, 0, attention.seqlen_q, attention.seqlen_k};
    if constexpr (config.varlen) {
      sequence = varlen_sequence(params.cu_seqlens_q, params.cu_seqlens_k, attention, batch);
    }
    const Band band = visible_band<config.window>(attention, sequence);
    const Range row_tiles = tile.rows_of(sequence);
    for (int head = tile.heads.begin; head < tile.heads.end; ++head) {
      for (int m = row_tiles.begin; m < row_tiles.end; ++m) {
        const int first_row = m * config.block_m;
        const Range queries = {first_row, first_row + config.block_m};
        const Range tiles = tile.cols_among(tiles_of(band.seen_by_any(queries), config.block_n));
        const auto mainloop = query_mainloop<config>(params, storage, sequence, head, first_row);
        if (mainloop.tiles.next(tiles.begin, tiles.end) >= tiles.end) continue;
        __syncthreads();  // the previous tiles are no longer read
        mainloop.template visit<false>(read_statistics<config>(params, sequence, head, first_row),
                                       tiles, [&](const typename Shape::Scores& gradients) {
#pragma unroll
                                         for (int i = 0; i < Shape::rows; ++i) {
#pragma unroll
                                           for (int j = 0; j < Shape::cols; ++j)
                                             sums.at[i][j] += gradients.at[i][j];
                                         }
                                       });
      }
    }
  }
  write_bias_gradient<config>(params, tile, storage, sums);
}

}  // namespace cupyflash
