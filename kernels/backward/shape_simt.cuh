// What both of the backward's main loops share: the split of a tile among warps, loads, and the
// way from scores to gradients of scores.
#pragma once

#include "attention/mask.cuh"
#include "attention/online_softmax.cuh"
#include "attention/score.cuh"
#include "attention/storage.cuh"
#include "attention/visible_tiles.cuh"
#include "tile/multiply_simt.cuh"
#include "tile/store.cuh"

namespace cupyflash {

/// `resident` rows stay for the whole loop (keys for their own gradients, queries for theirs), and
/// `streamed` rows pass by. Each warp has resident rows of its own.
template <BackwardConfig config, int resident, int streamed>
struct BackwardShape {
  using T = Accumulator<config.dtype>;
  using Rows = GlobalRows<const Element<config.dtype>>;
  static constexpr int warp_rows = resident / config.warps;
  static constexpr int rows = warp_rows / LaneGrid::rows;
  static constexpr int cols = streamed / LaneGrid::cols;
  static_assert(rows * LaneGrid::rows * config.warps == resident);
  static_assert(cols * LaneGrid::cols == streamed);

  using Scores = Fragment<T, rows, cols>;
  using KeySums = Fragment<T, rows, config.head_dim / LaneGrid::cols>;
  using ValueSums = Fragment<T, rows, config.head_dim_v / LaneGrid::cols>;

  __device__ static int warp_row() { return warp_index() * warp_rows; }

  /// First row of the lane within the tile; its others are LaneGrid::rows apart.
  __device__ static int lane_row() { return warp_row() + LaneGrid::row(); }

  template <class Tile>
  __device__ static void load(Tile& tile, const Rows& source, int first_row, Range valid) {
    load_tile<config.threads(), config.load_width, config.async_copy>(tile, source, first_row,
                                                                      valid);
  }

  /// Of this thread's copies: also before it ends, as a block without tiles to compute loads too.
  __device__ static void wait_for_copies() {
    if constexpr (config.async_copy) copy_async_wait();
  }

  __device__ static void wait_for_loads() {
    wait_for_copies();
    __syncthreads();
  }

  /// Hands a lane's scores to the other lanes of its warp.
  template <class Tile>
  __device__ static void share(Tile& tile, const Scores& scores) {
    __syncwarp();  // all lanes have read what the tile held before
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      T* row = tile.row(lane_row() + i * LaneGrid::rows) + LaneGrid::col();
#pragma unroll
      for (int j = 0; j < cols; ++j) row[j * LaneGrid::cols] = scores.at[i][j];
    }
    __syncwarp();
  }

  /// sums += left * right for the warp's rows of `left`, which go by way of `tile`.
  template <class Sums, class Tile, class Right>
  __device__ static void accumulate(Sums& sums, const Scores& left, Tile& tile,
                                    const Right& right) {
    share(tile, left);
    T ones[rows];
#pragma unroll
    for (int i = 0; i < rows; ++i) ones[i] = T(1);
    accumulate_product<working_registers, config.hides()>(sums, ones, tile, lane_row(), right);
  }

  /// What dropout makes of P, and of dP.
  __device__ static void drop(Scores& values, const LaneBits& kept, T keep_factor) {
#pragma unroll
    for (int i = 0; i < rows; ++i) {
#pragma unroll
      for (int j = 0; j < cols; ++j) {
        T& value = values.at[i][j];
        value = kept.at(i * cols + j) ? value * keep_factor : T(0);
      }
    }
  }

  /// Products to scores; the gradients of the scores as far as the row statistics go in by
  /// themselves: (dP - D) * d score / d (softmax_scale * product), still to be multiplied by P.
  /// Not by_product: d score / d bias in its place.
  template <bool by_product = true, class ScoreOf>
  __device__ static void score_pair(const ScoreOf& score, T& product, T& gradient, T delta,
                                    int query_index, int key_index) {
    gradient = (gradient - delta) * score.factor(product, query_index, key_index);
    if constexpr (by_product) gradient *= score.derivative(product);
    product = score.value(product, query_index, key_index);
  }

  /// dS from P and what score_pair made of dP, which may be NaN where masks hide.
  __device__ static T score_gradient(T probability, T gradient) {
    if (config.hides() && probability == T(0)) return T(0);
    return gradient * probability;
  }

  template <class Sums>
  __device__ static void store(const GlobalRows<Element<config.dtype>>& target, int first_row,
                               int row_limit, const Sums& sums, T factor) {
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      const int row = first_row + lane_row() + i * LaneGrid::rows;
      if (row < row_limit) store_row<config.store_width>(target, row, sums.at[i], factor);
    }
  }

 private:
  static constexpr int working_registers = 64;
};

}  // namespace cupyflash
