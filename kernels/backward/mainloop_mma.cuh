// Gradients of a key tile and its values, and the tile's share of all queries' gradients, on tensor
// cores by mma.sync (FlashAttention-2, Algorithm 2). K and V stay; query tiles of all heads of the
// group pass by. Scores are computed transposed, so that P^T and dS^T are operands of dV and dK as
// they are, in registers.
//
//   barrier   |                                                                  |
//   tensor    | dQ(m-1) = dS K | S^T = K Q^T | dP^T = V dO^T | dV += P^T dO | dK += dS^T Q |
//   ordinary  | add dQ         |             | P = exp S     | dS, to shared memory        |
//   copies    | Q, dO, m, l, D of tile m+1 -------------------------------------> |
//
// dS goes through shared memory for dQ alone, one tile late: one barrier a tile. Where several
// warps share a tile's queries, each first uses what it made, then, after a second barrier, the
// others' P and dS from shared memory; dQ follows at once.
#pragma once

#include "arch/opaque.cuh"
#include "backward/query_gradient_mma.cuh"
#include "backward/scores_mma.cuh"

namespace cupyflash {

template <MmaBackwardConfig config>
struct MmaBackwardMainloop {
  using Block = MmaBackwardBlock<config>;
  using Gradients = MmaScoreGradients<config>;
  using QueryGradient = MmaQueryGradient<config>;
  using Shape = typename Block::Shape;
  using Head = typename Block::Head;
  using Scores = typename Block::Scores;
  using Probabilities = typename Block::Probabilities;
  using KeySums = typename Block::KeySums;
  using ValueSums = typename Block::ValueSums;
  using QueryTile = typename Block::QueryTile;
  using GradOutTile = typename Block::GradOutTile;
  using KeyTile = typename Block::KeyTile;
  using ValueTile = typename Block::ValueTile;
  using ScoreTile = typename Block::ScoreTile;
  using Rows = typename Block::Rows;
  using Walk = typename Block::Walk;
  template <class Tile>
  using Loader = typename Block::template Loader<Tile>;
  static constexpr int m_tiles = Block::m_tiles;
  static constexpr int n_tiles = Block::n_tiles;
  static constexpr int pieces = Block::pieces;
  static constexpr int units = Block::units;
  static constexpr int query_steps = Shape::warp_queries / 16;

  Block block;

  /// Starts loading K and V; the first barrier of `run` completes it.
  __device__ void load_keys(const Rows& key, const Rows& value) const {
    const Range valid_keys = block.band.seen_by_any({0, block.band.rows});
    Loader<KeyTile>{key}.load(block.key_tile(), block.first_key, valid_keys);
    Loader<ValueTile>{value}.load(block.value_tile(), block.first_key, valid_keys);
  }

  __device__ void run(const Head& head, KeySums& grad_key, ValueSums& grad_value) const {
    const Band transposed = block.band.transposed();
    const Range tile_keys = {block.first_key, block.first_key + config.block_n};
    const Range tiles = tiles_of(transposed.seen_by_any(tile_keys), config.block_m);
    Walk walk(head.states, tiles);
    if (!walk.exists(0)) return;
    const Range valid_queries = transposed.seen_by_any({0, transposed.rows});
    const Range unmasked =
        tile_keys.end > block.band.cols ? Range{0, 0} : transposed.seen_by_all(tile_keys);

    load_queries(head, walk.slot(), walk.tile(0), valid_queries);
    int last = 0;         // the tile before this one
    bool hidden = false;  // whether it hides something that no block.band hides
    for (bool first = true; walk.exists(0); first = false) {
      const int m = walk.tile(0);
      copy_async_wait_group<0>();
      hidden = barrier(hidden);
      // Without a next tile, zeros are written where nothing is read.
      const Range next_queries = walk.exists(1) ? valid_queries : Range{0, 0};
      if constexpr (!Shape::exchange) {
        if (!first) {
          QueryGradient::put_bias(block, head, walk.slot() - 1, last);
          QueryGradient::add(block, head, walk.slot() - 1, last, hidden);
        }
      }
      const Range tile_queries = {m * config.block_m, (m + 1) * config.block_m};
      hidden = step(head, grad_key, grad_value, walk, !unmasked.covers(tile_queries), next_queries);
      if constexpr (Shape::exchange) {
        QueryGradient::put_bias(block, head, walk.slot(), m);
        QueryGradient::add(block, head, walk.slot(), m, hidden);
      }
      last = m;
      walk.advance();
    }
    copy_async_wait_group<0>();  // the zeros too, before another head's tiles come
    hidden = barrier(hidden);
    if constexpr (!Shape::exchange) {
      QueryGradient::put_bias(block, head, walk.slot() - 1, last);
      QueryGradient::add(block, head, walk.slot() - 1, last, hidden);
    }
  }

 private:
  /// Waits for all warps, and tells whether something is hidden for any of them.
  __device__ static bool barrier(bool hidden) {
    if constexpr (config.hides()) return __syncthreads_or(hidden);
    __syncthreads();
    return false;
  }

  __device__ void load_queries(const Head& head, int slot, int m, const Range& valid) const {
    head.query.load(block.query_tile(slot), m * config.block_m, valid);
    head.grad_out.load(block.grad_out_tile(slot), m * config.block_m, valid);
    load_statistics(head, slot, m, valid);
    if constexpr (config.bias) {
      BiasLoader<typename Block::Bias, config.threads(), config.bias_width>::load(
          block.bias_tile(slot), head.score.bias, m * config.block_m, block.first_key);
    }
    copy_async_commit();
  }

  __device__ void load_statistics(const Head& head, int slot, int m, const Range& valid) const {
    const int first_query = m * config.block_m;
    const float* source = head.params.statistics + (opaque(head.scratch) + first_query) * 3;
    constexpr int count = 3 * config.block_m;
    // With an exchange there is no register to keep what follows from it.
    const int thread = Shape::exchange ? opaque(int(threadIdx.x)) : int(threadIdx.x);
#pragma unroll
    for (int base = 0; base < count; base += config.threads()) {
      const int index = base + thread;
      const int row = index / 3, kind = index % 3;
      if (index < count) {
        copy_async_to<4>(block.statistics(slot) + (kind * config.block_m + row) * 4, source + index,
                         valid.contains(first_query + row));
      }
    }
  }

  /// 16 columns' part of left * right^T, dot products of rows.
  template <class Left, class Right>
  __device__ static void multiply_slice(Scores& scores, const ColumnWalk<Left>& left,
                                        const ColumnWalk<Right>& right, int step) {
    unsigned a[m_tiles][4];
#pragma unroll
    for (int i = 0; i < m_tiles; ++i) load_matrices(a[i], left.at(step, i * 16));
    cupyflash::multiply_slice<config.dtype>(scores, a, right, step);
  }

  /// One tile: dK and dV, and dS^T in shared memory. Returns whether something is hidden that no
  /// block.band hides, for this warp, or, with an exchange, for any.
  __device__ bool step(const Head& head, KeySums& grad_key, ValueSums& grad_value, const Walk walk,
                       bool masked, const Range& next_queries) const {
    const int slot = walk.slot(), m = walk.tile(0);
    const int key_row = Shape::key_row();
    const int query_col = Shape::query_warp() * Shape::warp_queries;
    const unsigned stat = block.statistics(slot) + (query_col + MmaLane::col()) * 4;
    Scores scores;
    scores.fill(0.0f);
    {
      const auto left = WalkOf<KeyTile>::left(block.key_tile(), key_row);
      const auto right = WalkOf<QueryTile>::right(block.query_tile(slot), query_col);
#pragma unroll
      for (int k = 0; k < config.head_dim / 16; ++k) {
        multiply_slice(scores, left, right, k);
        // Here, so that the arithmetic of addresses has products to fill.
        if (k == 0) load_queries(head, slot + 1, walk.ahead_of(m, 1), next_queries);
      }
    }
    if (masked) {
      apply_mask(scores, block.band.transposed(), block.first_key + key_row,
                 m * config.block_m + query_col);
    }
    bool hidden = false;
    if constexpr (config.masked()) {
      if (walk.mixed(0) || !config.visibility) {
        hide_unseen<true>(scores, head.mask, block.first_key + key_row,
                          m * config.block_m + query_col);
        hidden = true;
      }
    }

    // dP - D: the products are added to -D.
    Scores slopes;
#pragma unroll
    for (int j = 0; j < n_tiles; ++j) {
      const float2 delta = Gradients::delta_of(head, stat, j);
#pragma unroll
      for (int i = 0; i < m_tiles; ++i) {
        slopes.at[i][j][0] = slopes.at[i][j][2] = -delta.x;
        slopes.at[i][j][1] = slopes.at[i][j][3] = -delta.y;
      }
    }
    Probabilities p;
    typename Block::Late late;
    const auto left = WalkOf<ValueTile>::left(block.value_tile(), key_row);
    const auto right = WalkOf<GradOutTile>::right(block.grad_out_tile(slot), query_col);
    if (Gradients::seldom_careful && !masked && !hidden) {
      hidden = multiply_values<false>(head, scores, late, slopes, p, walk, left, right);
      if (config.bias && __any_sync(0xffffffffu, hidden)) {
        Gradients::hide_by_bias(block, scores, p, slot);
      }
    } else {
      hidden |= multiply_values<true>(head, scores, late, slopes, p, walk, left, right);
    }
    if constexpr (config.hides()) {
      if (__any_sync(0xffffffffu, hidden || masked)) Gradients::clear_hidden(scores, slopes);
    }
    return use_scores(head, grad_key, grad_value, scores, late, slopes, p, walk, hidden);
  }

  /// slopes += V dO^T, beside P = exp(S). Returns, and is told, what `exponentiate_slice` is.
  template <bool careful>
  __device__ bool multiply_values(const Head& head, Scores& scores, typename Block::Late& late,
                                  Scores& slopes, Probabilities& p, const Walk& walk,
                                  const ColumnWalk<ValueTile>& left,
                                  const ColumnWalk<GradOutTile>& right) const {
    constexpr int steps = config.head_dim_v / 16;
    bool hidden = false;
#pragma unroll
    for (int k = 0; k < steps; ++k) {
      multiply_slice(slopes, left, right, k);
      hidden |= Gradients::template exponentiate_slice<careful>(
          block, head, scores, late, p, walk, units * k / steps, units * (k + 1) / steps);
    }
    return hidden;
  }

  /// Of all queries, the columns that this warp adds up for dK or dV.
  template <int cols, class Tile>
  __device__ static PartialWalk<Tile, cols / 2> columns_of(const Tile& tile) {
    return {WalkOf<Tile>::left(tile, 0), Shape::query_warp()};
  }

  /// dV += P^T dO and dK += dS^T Q of this warp's queries, with an exchange then of the others'.
  /// dS^T and, with an exchange, P^T go to shared memory.
  __device__ bool use_scores(const Head& head, KeySums& grad_key, ValueSums& grad_value,
                             const Scores& scores, const typename Block::Late& late,
                             const Scores& slopes, const Probabilities& p, const Walk walk,
                             bool hidden) const {
    const int m = walk.slot();
    const int own_row = Shape::query_warp() * Shape::warp_queries;
    const unsigned stat = block.statistics(m) + (own_row + MmaLane::col()) * 4;
    Probabilities ds;
    const int first_query = walk.tile(0) * config.block_m + own_row;
    const int first_key = block.first_key + Shape::key_row();
    ModifiedGradient<config> modified(head.score.function, head.params.common.grad_score_params,
                                      head.grad_bias.factor, first_query, first_key);
    typename Block::BiasGradientTile grad_bias(head.params.common, head.grad_bias, first_query,
                                               first_key);
    constexpr int pairs_v = ValueSums::n_tiles / 2, slices_v = query_steps * pairs_v;
    const auto grad_out = columns_of<2 * pairs_v>(block.grad_out_tile(m));
    const auto own_grad_out = grad_out.down(own_row);
#pragma unroll
    for (int slice = 0; slice < slices_v; ++slice) {
      accumulate_slice<config.dtype>(grad_value, p.at[slice / pairs_v], own_grad_out,
                                     slice / pairs_v, slice % pairs_v, slice % pairs_v);
      const int first = pieces * slice / slices_v, end = pieces * (slice + 1) / slices_v;
      if constexpr (Shape::exchange)
        Gradients::store_slice(block.probability_tile(), p, first, end);
      Gradients::differentiate_slice(head, scores, late, slopes, ds, modified, grad_bias, stat,
                                     first, end);
    }
    if constexpr (config.score_mod) modified.arrays.finish();
    if constexpr (config.bias && !Block::staged_bias) grad_bias.finish();
    constexpr int pairs = KeySums::n_tiles / 2, slices = query_steps * pairs;
    const auto query = columns_of<2 * pairs>(block.query_tile(m));
    const auto own_query = query.down(own_row);
#pragma unroll
    for (int slice = 0; slice < slices; ++slice) {
      accumulate_slice<config.dtype>(grad_key, ds.at[slice / pairs], own_query, slice / pairs,
                                     slice % pairs, slice % pairs);
      Gradients::store_slice(block.score_tile(m), ds, pieces * slice / slices,
                             pieces * (slice + 1) / slices);
    }
    if constexpr (Shape::exchange) {
      // Found before the barrier, so that nobody waits for it after it.
      const ColumnWalk<ScoreTile> gradients = {
          opaque(WalkOf<ScoreTile>::left(block.score_tile(m), Shape::key_row()).base)};
      hidden = barrier(hidden);
      use_others(grad_value, gradients.down(config.block_n), grad_out);  // P^T lies after dS^T
      use_others(grad_key, gradients, query);
    }
    return hidden;
  }

  /// sums += left * right of the queries of the other warps that share this one's keys.
  template <int cols, class Right>
  __device__ static void use_others(MmaFragment<m_tiles, cols>& sums,
                                    const ColumnWalk<ScoreTile>& left, const Right& right) {
#pragma unroll
    for (int other = 1; other < config.query_warps; ++other) {
      const int part = unsigned(Shape::query_warp() + other) % config.query_warps;
      const PartialWalk<ScoreTile, query_steps> left_walk(left, part);
      const auto right_walk = right.down(part * Shape::warp_queries);
#pragma unroll
      for (int step = 0; step < query_steps; ++step) {
        unsigned a[m_tiles][4];
#pragma unroll
        for (int i = 0; i < m_tiles; ++i) load_matrices(a[i], left_walk.at(step, i * 16));
#pragma unroll
        for (int pair = 0; pair < cols / 2; ++pair) {
          accumulate_slice<config.dtype>(sums, a, right_walk, step, pair, pair);
        }
      }
    }
  }
};

}  // namespace cupyflash
