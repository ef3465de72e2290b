// Gradients of a key tile and its values: K and V stay, query tiles of all heads of the group pass
// by. Scores are computed transposed, so that P^T and dS^T are left operands as they are.
//
//   barrier    |                 |                                                |
//   products   |                 | dP^T=V dO^T  S^T=K Q^T  dV+=P^T dO  dK+=dS^T Q |
//   copies     | Q, dO, m, l, D  |                                                | next tile
//
// Another block of the same multiprocessor computes while one copies.
#pragma once

#include "backward/shape_simt.cuh"

namespace cupyflash {

template <BackwardConfig config>
struct KeyGradientMainloop {
  using Shape = BackwardShape<config, config.block_n, config.block_m>;
  using T = typename Shape::T;
  using Rows = typename Shape::Rows;
  using ScoreOf = Score<config>;

  KeyGradientStorage<config>& storage;
  Band band;  // queries by keys
  int first_key;

  /// What one query head contributes; statistics point at the sequence's first query.
  struct Head {
    Rows query;
    Rows grad_out;
    const T* row_max;
    const T* row_sum;
    const T* delta;
    int64 row_max_stride;
    int64 row_sum_stride;
    int64 delta_stride;
    ScoreOf score;
    ElementMask<config> mask;
    Dropout<config> dropout;
    TileStates<config.visibility> tiles;  // of queries
  };

  __device__ void load_keys(const Rows& key, const Rows& value) const {
    const Range valid_keys = band.seen_by_any({0, band.rows});
    Shape::load(storage.key, key, first_key, valid_keys);
    Shape::load(storage.value, value, first_key, valid_keys);
  }

  __device__ void run(const Head& head, typename Shape::KeySums& grad_key,
                      typename Shape::ValueSums& grad_value) const {
    const Band transposed = band.transposed();
    const Range query_tiles =
        tiles_of(transposed.seen_by_any({first_key, first_key + config.block_n}), config.block_m);
    const Range valid_queries = transposed.seen_by_any({0, transposed.rows});
    const int warp_key = first_key + Shape::warp_row();
    const Range warp_keys = {warp_key, warp_key + Shape::warp_rows};
    const Range warp_queries = transposed.seen_by_any(warp_keys);
    const Range unmasked_queries = transposed.seen_by_all(warp_keys);

    for (int m = head.tiles.next(query_tiles.begin, query_tiles.end); m < query_tiles.end;
         m = head.tiles.next(m + 1, query_tiles.end)) {
      const int first_query = m * config.block_m;
      const Range tile_queries = {first_query, first_query + config.block_m};
      __syncthreads();  // the previous tile is no longer read
      Shape::load(storage.query, head.query, first_query, valid_queries);
      Shape::load(storage.grad_out, head.grad_out, first_query, valid_queries);
      load_statistics(head, first_query);
      Shape::wait_for_loads();
      if (warp_queries.meets(tile_queries)) {
        const bool masked = !unmasked_queries.covers(tile_queries);
        const bool tested = !config.visibility || head.tiles.mixed(m);
        differentiate(head, first_query, masked, tested, grad_key, grad_value);
      }
    }
  }

 private:
  /// Queries that do not exist get P = 0.
  __device__ void load_statistics(const Head& head, int first_query) const {
    for (int m = threadIdx.x; m < config.block_m; m += config.threads()) {
      const int64 row = first_query + m;
      const bool exists = row < band.rows;
      auto& statistics = storage.statistics;
      statistics.shift[m] = exists ? finite_shift(head.row_max[row * head.row_max_stride]) : T(0);
      statistics.inverse_sum[m] =
          exists ? inverse_sum(head.row_sum[row * head.row_sum_stride]) : T(0);
      statistics.delta[m] = exists ? head.delta[row * head.delta_stride] : T(0);
    }
  }

  __device__ void differentiate(const Head& head, int first_query, bool masked, bool tested,
                                typename Shape::KeySums& grad_key,
                                typename Shape::ValueSums& grad_value) const {
    const auto& statistics = storage.statistics;
    const int lane_key = first_key + Shape::lane_row();
    const int lane_query = first_query + LaneGrid::col();

    typename Shape::Scores gradients;  // dP^T
    multiply_rows(gradients, storage.value, Shape::lane_row(), storage.grad_out);
    LaneBits kept;
    if constexpr (config.dropout) {
      kept = kept_elements<true, Shape::rows, Shape::cols>(head.dropout, lane_key, lane_query);
      Shape::drop(gradients, kept, head.dropout.keep_factor);
    }
    typename Shape::Scores scores;
    multiply_rows(scores, storage.key, Shape::lane_row(), storage.query);
#pragma unroll
    for (int j = 0; j < Shape::cols; ++j) {
      const T delta = statistics.delta[LaneGrid::col() + j * LaneGrid::cols];
#pragma unroll
      for (int i = 0; i < Shape::rows; ++i) {
        Shape::score_pair(head.score, scores.at[i][j], gradients.at[i][j], delta,
                          lane_query + j * LaneGrid::cols, lane_key + i * LaneGrid::rows);
      }
    }
    if (masked) apply_mask(scores, band.transposed(), lane_key, lane_query);
    if constexpr (ElementMask<config>::given) {
      if (tested) apply_element_mask<true>(scores, head.mask, lane_key, lane_query);
    }
#pragma unroll
    for (int j = 0; j < Shape::cols; ++j) {
      const T shift = statistics.shift[LaneGrid::col() + j * LaneGrid::cols];
      const T inverse = statistics.inverse_sum[LaneGrid::col() + j * LaneGrid::cols];
#pragma unroll
      for (int i = 0; i < Shape::rows; ++i) {
        scores.at[i][j] = exp_difference(scores.at[i][j], shift) * inverse;               // P^T
        gradients.at[i][j] = Shape::score_gradient(scores.at[i][j], gradients.at[i][j]);  // dS^T
      }
    }
    if constexpr (config.dropout) Shape::drop(scores, kept, head.dropout.keep_factor);
    Shape::accumulate(grad_value, scores, storage.transposed_scores, storage.grad_out);
    Shape::accumulate(grad_key, gradients, storage.transposed_scores, storage.query);
  }
};

}  // namespace cupyflash
