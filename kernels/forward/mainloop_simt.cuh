// The forward's loop over key tiles on ordinary multiply-add units.
//
//   barrier      |               |               |               |
//   products     | S(0)  softmax | O += P V(0)   | S(1)  softmax | O += P V(1)
//   copies       | V(0)--------->| K(1)--------->| V(1)--------->| K(2)--------->
//
// One buffer each for K and V: either is refilled while the other is in use.
#pragma once

#include "attention/mask.cuh"
#include "attention/online_softmax.cuh"
#include "attention/score.cuh"
#include "attention/storage.cuh"
#include "attention/visible_tiles.cuh"
#include "tile/multiply_simt.cuh"

namespace cupyflash {

/// How the threads of a block share its tiles: each warp has rows of its own, so that softmax and
/// the exchange of probabilities stay inside it.
template <ForwardConfig config>
struct ForwardShape {
  using T = Accumulator<config.dtype>;
  static constexpr int warp_rows = config.block_m / config.warps;
  static constexpr int rows = warp_rows / LaneGrid::rows;
  static constexpr int cols = config.block_n / LaneGrid::cols;
  static constexpr int cols_v = config.head_dim_v / LaneGrid::cols;
  static_assert(rows * LaneGrid::rows * config.warps == config.block_m);
  static_assert(cols * LaneGrid::cols == config.block_n);
};

/// What a lane knows of its rows: m, l and the unnormalised output.
template <ForwardConfig config>
struct ForwardState {
  using Shape = ForwardShape<config>;
  OnlineSoftmax<typename Shape::T, Shape::rows> softmax;
  Fragment<typename Shape::T, Shape::rows, Shape::cols_v> sums;
};

template <ForwardConfig config>
struct ForwardMainloop {
  using Shape = ForwardShape<config>;
  using T = typename Shape::T;
  using Queries = GlobalRows<const Element<config.dtype>>;
  using Keys = GlobalRows<const Element<config.kv_dtype>>;  // and values

  ForwardStorage<config>& storage;
  Queries query;
  Keys key;
  Keys value;
  Band band;
  Score<config> score;
  ElementMask<config> mask;
  Dropout<config> dropout;
  TileStates<config.visibility> tiles;  // of keys
  int first_query;                      // of the tile

  template <class Tile, class Rows>
  __device__ void load(Tile& tile, const Rows& source, int first_row, Range valid) const {
    load_tile<config.threads(), config.load_width, config.async_copy>(tile, source, first_row,
                                                                      valid);
  }

  __device__ static void wait_for_loads() {
    if constexpr (config.async_copy) copy_async_wait();
    __syncthreads();
  }

  /// First row of the lane within the tile; its others are LaneGrid::rows apart.
  __device__ static int lane_row() { return warp_index() * Shape::warp_rows + LaneGrid::row(); }

  __device__ void run(ForwardState<config>& state) const {
    // What no query of the tile sees may hold NaN, which 0 * NaN would spread: it is not loaded.
    const Range valid_keys = band.seen_by_any({first_query, first_query + config.block_m});
    const Range key_tiles = tiles_of(valid_keys, config.block_n);
    const int warp_query = first_query + warp_index() * Shape::warp_rows;
    const Range warp_queries = {warp_query, warp_query + Shape::warp_rows};
    const Range warp_keys = band.seen_by_any(warp_queries);
    const Range unmasked_keys =
        config.hides() ? band.seen_by_existing(warp_queries) : band.seen_by_all(warp_queries);

    state.sums.fill(T(0));
    load(storage.query, query, first_query, {0, band.rows});
    int n = tiles.next(key_tiles.begin, key_tiles.end);
    load(storage.key, key, n * config.block_n, valid_keys);
    while (n < key_tiles.end) {
      const Range tile_keys = {n * config.block_n, (n + 1) * config.block_n};
      const bool active = warp_keys.meets(tile_keys);  // the same in all lanes
      bool unused = false;
      T correction[Shape::rows];

      wait_for_loads();
      load(storage.value, value, tile_keys.begin, valid_keys);
      if (active) {
        unused = attend(state, correction, tile_keys.begin, !unmasked_keys.covers(tile_keys),
                        !config.visibility || tiles.mixed(n));
      }
      wait_for_loads();
      n = tiles.next(n + 1, key_tiles.end);
      if (n < key_tiles.end) load(storage.key, key, n * config.block_n, valid_keys);
      if (active) {
        accumulate_product<working_registers, config.hides()>(
            state.sums, correction, storage.probabilities, lane_row(), storage.value, unused);
      }
    }
    if constexpr (config.async_copy) copy_async_wait();  // of a block that sees no key tile
    state.softmax.finish();
  }

 private:
  // The product takes the registers of the scores, which are no longer needed; a wide head_dim
  // leaves room for less, and so does the test for unused keys.
  static constexpr int sum_registers = Shape::rows * Shape::cols_v * int(sizeof(T) / 4);
  static constexpr int working_registers =
      (sum_registers < 96 ? 128 : 64) / (config.hides() ? 2 : 1);

  /// S = score(Q K^T), then P = exp(S - m) into shared memory. Returns whether there may be keys
  /// whose P are all 0, and which may hold NaN.
  __device__ bool attend(ForwardState<config>& state, T (&correction)[Shape::rows], int first_key,
                         bool masked, bool tested) const {
    Fragment<T, Shape::rows, Shape::cols> scores;
    multiply_rows(scores, storage.query, lane_row(), storage.key);
    const int lane_query = first_query + lane_row();
    const int lane_key = first_key + LaneGrid::col();
#pragma unroll
    for (int i = 0; i < Shape::rows; ++i) {
#pragma unroll
      for (int j = 0; j < Shape::cols; ++j) {
        scores.at[i][j] = score.value(scores.at[i][j], lane_query + i * LaneGrid::rows,
                                      lane_key + j * LaneGrid::cols);
      }
    }
    // One branch a tile, the same in all lanes of a warp; a second copy of the loop would only
    // fill the instruction cache.
    if (masked) apply_mask(scores, band, lane_query, lane_key);
    if constexpr (ElementMask<config>::given) {
      if (tested) apply_element_mask<false>(scores, mask, lane_query, lane_key);
    }
    state.softmax.update(scores, correction);
    if constexpr (config.dropout) {
      const LaneBits kept =
          kept_elements<false, Shape::rows, Shape::cols>(dropout, lane_query, lane_key);
#pragma unroll
      for (int i = 0; i < Shape::rows; ++i) {
#pragma unroll
        for (int j = 0; j < Shape::cols; ++j) {
          if (!kept.at(i * Shape::cols + j)) scores.at[i][j] = T(0);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < Shape::rows; ++i) {
      T* row = storage.probabilities.row(lane_row() + i * LaneGrid::rows) + LaneGrid::col();
#pragma unroll
      for (int j = 0; j < Shape::cols; ++j) row[j * LaneGrid::cols] = scores.at[i][j];
    }
    return config.hides() && has_unused(scores);
  }
};

}  // namespace cupyflash
