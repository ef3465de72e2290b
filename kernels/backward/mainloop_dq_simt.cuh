// Gradient of a query tile: Q and dO stay, key tiles pass by.
//
//   barrier    |       |                                 |
//   products   |       | dP=dO V^T  S=Q K^T  dQ+=dS K    |
//   copies     | K, V  |                                 | next tile
#pragma once

#include "backward/shape_simt.cuh"

namespace cupyflash {

template <BackwardConfig config>
struct QueryGradientMainloop {
  using Shape = BackwardShape<config, config.block_m, config.block_n>;
  using T = typename Shape::T;
  using Rows = typename Shape::Rows;

  QueryGradientStorage<config>& storage;
  Rows query;
  Rows grad_out;
  Rows key;
  Rows value;
  Band band;
  Score<config> score;
  ElementMask<config> mask;
  Dropout<config> dropout;
  TileStates<config.visibility> tiles;  // of keys
  void* const* score_array_sums;        // a score_mod's gradients
  int first_query;

  /// Statistics of the lane's rows, ready to use.
  struct Statistics {
    T shift[Shape::rows];
    T inverse_sum[Shape::rows];
    T delta[Shape::rows];
  };

  __device__ void run(const Statistics& statistics, typename Shape::KeySums& grad_query) const {
    const Range tile_queries = {first_query, first_query + config.block_m};
    const Range key_tiles = tiles_of(band.seen_by_any(tile_queries), config.block_n);
    visit<true>(statistics, key_tiles, [&](const typename Shape::Scores& gradients) {
      Shape::accumulate(grad_query, gradients, storage.scores, storage.key);
    });
  }

  /// Calls `use` with dS of each key tile; by_product: as far as softmax_scale * product, else as
  /// far as the bias.
  template <bool by_product, class Use>
  __device__ void visit(const Statistics& statistics, const Range& key_tiles,
                        const Use& use) const {
    const Range valid_keys = band.seen_by_any({0, band.rows});
    const int warp_query = first_query + Shape::warp_row();
    const Range warp_queries = {warp_query, warp_query + Shape::warp_rows};
    const Range warp_keys = band.seen_by_any(warp_queries);
    const Range unmasked_keys =
        config.hides() ? band.seen_by_existing(warp_queries) : band.seen_by_all(warp_queries);

    // Queries that see nothing have dq = 0 whatever their grad_out holds.
    const Range valid_queries = band.transposed().seen_by_any({0, band.cols});
    Shape::load(storage.query, query, first_query, valid_queries);
    Shape::load(storage.grad_out, grad_out, first_query, valid_queries);
    for (int n = tiles.next(key_tiles.begin, key_tiles.end); n < key_tiles.end;
         n = tiles.next(n + 1, key_tiles.end)) {
      const int first_key = n * config.block_n;
      const Range tile_keys = {first_key, first_key + config.block_n};
      __syncthreads();  // the previous tile is no longer read
      Shape::load(storage.key, key, first_key, valid_keys);
      Shape::load(storage.value, value, first_key, valid_keys);
      Shape::wait_for_loads();
      if (warp_keys.meets(tile_keys)) {
        const bool masked = !unmasked_keys.covers(tile_keys);
        const bool tested = !config.visibility || tiles.mixed(n);
        typename Shape::Scores gradients;
        differentiate<by_product>(statistics, first_key, masked, tested, gradients);
        use(gradients);
      }
    }
    Shape::wait_for_copies();
  }

 private:
  template <bool by_product>
  __device__ void differentiate(const Statistics& statistics, int first_key, bool masked,
                                bool tested, typename Shape::Scores& gradients) const {
    const int lane_query = first_query + Shape::lane_row();
    const int lane_key = first_key + LaneGrid::col();

    multiply_rows(gradients, storage.grad_out, Shape::lane_row(), storage.value);  // dP
    if constexpr (config.dropout) {
      const LaneBits kept =
          kept_elements<false, Shape::rows, Shape::cols>(dropout, lane_query, lane_key);
      Shape::drop(gradients, kept, dropout.keep_factor);
    }
    typename Shape::Scores scores;
    multiply_rows(scores, storage.query, Shape::lane_row(), storage.key);
    [[maybe_unused]] const auto slopes = gradients, products = scores;
#pragma unroll
    for (int i = 0; i < Shape::rows; ++i) {
#pragma unroll
      for (int j = 0; j < Shape::cols; ++j) {
        Shape::template score_pair<by_product>(score, scores.at[i][j], gradients.at[i][j],
                                               statistics.delta[i], lane_query + i * LaneGrid::rows,
                                               lane_key + j * LaneGrid::cols);
      }
    }
    if (masked) apply_mask(scores, band, lane_query, lane_key);
    if constexpr (ElementMask<config>::given) {
      if (tested) apply_element_mask<false>(scores, mask, lane_query, lane_key);
    }
    ScoreArrayGradients<T, config.score_mod, config.exact_sums> array_gradients(score_array_sums);
#pragma unroll
    for (int i = 0; i < Shape::rows; ++i) {
#pragma unroll
      for (int j = 0; j < Shape::cols; ++j) {
        const T probability =
            exp_difference(scores.at[i][j], statistics.shift[i]) * statistics.inverse_sum[i];
        gradients.at[i][j] = Shape::score_gradient(probability, gradients.at[i][j]);  // dS
        if (by_product && array_gradients.wanted && probability != T(0)) {
          const int query_index = lane_query + i * LaneGrid::rows;
          const int key_index = lane_key + j * LaneGrid::cols;
          array_gradients.add(score.function, probability * (slopes.at[i][j] - statistics.delta[i]),
                              score.unmodified(products.at[i][j], query_index, key_index),
                              query_index, key_index);
        }
      }
    }
    if constexpr (by_product) array_gradients.finish();
  }
};

}  // namespace cupyflash
