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

#include "arch/exponential.cuh"
#include "arch/opaque.cuh"
#include "arch/pack.cuh"
#include "arch/reduce.cuh"
#include "attention/mask_mma.cuh"
#include "attention/params_mma.cuh"
#include "attention/query_sums.cuh"
#include "backward/shape_mma.cuh"
#include "tile/load_swizzled.cuh"
#include "tile/multiply_mma.cuh"

namespace cupyflash {

template <MmaBackwardConfig config>
struct MmaBackwardMainloop {
  using Shape = MmaBackwardShape<config>;
  using Scores = typename Shape::Scores;
  using KeySums = typename Shape::KeySums;
  using ValueSums = typename Shape::ValueSums;
  using QueryTile = typename Shape::QueryTile;
  using GradOutTile = typename Shape::GradOutTile;
  using KeyTile = typename Shape::KeyTile;
  using ValueTile = typename Shape::ValueTile;
  using ScoreTile = typename Shape::ScoreTile;
  using Rows = GlobalRows<const Element<config.dtype>>;
  using ScoreOf = Score<config>;
  static constexpr int m_tiles = Shape::m_tiles;
  static constexpr int n_tiles = Shape::n_tiles;
  static constexpr int pieces = m_tiles * n_tiles;
  static constexpr int query_steps = Shape::warp_queries / 16;

  template <class Tile>
  using Loader = SwizzledLoader<Tile, config.threads(), config.load_width, Element<config.dtype>>;

  using Probabilities = MmaOperand<m_tiles, n_tiles>;

  /// What one query head contributes.
  struct Head {
    Loader<QueryTile> query;
    Loader<GradOutTile> grad_out;
    const MmaBackwardParams& params;
    int64 scratch;  // row of the sequence's first query
    int* turns;     // of the sequence's first query tile
    ScoreOf score;
  };

  unsigned shared;  // address of the block's shared memory
  Band band;        // queries by keys
  int first_key;
  float factor;  // from scores to exponents of 2

  __device__ KeyTile key_tile() const { return {shared}; }
  __device__ ValueTile value_tile() const { return {shared + Shape::value_offset}; }
  __device__ QueryTile query_tile(int m) const {
    return {shared + Shape::query_offset + (m & 1) * QueryTile::bytes};
  }
  __device__ GradOutTile grad_out_tile(int m) const {
    return {shared + Shape::grad_out_offset + (m & 1) * GradOutTile::bytes};
  }
  /// dS^T; with an exchange, P^T is in the other.
  __device__ ScoreTile score_tile(int m) const {
    return {shared + Shape::score_offset + (Shape::exchange ? 0 : m & 1) * ScoreTile::bytes};
  }
  __device__ ScoreTile probability_tile() const {
    return {shared + Shape::score_offset + ScoreTile::bytes};
  }
  /// m * log2(e), 1 / l, D, block_m of each.
  __device__ unsigned statistics(int m) const {
    return shared + Shape::statistics_offset + (m & 1) * Shape::statistics_bytes;
  }

  /// Starts loading K and V; the first barrier of `run` completes it.
  __device__ void load_keys(const Rows& key, const Rows& value) const {
    const Range valid_keys = band.seen_by_any({0, band.rows});
    Loader<KeyTile>{key}.load(key_tile(), first_key, valid_keys);
    Loader<ValueTile>{value}.load(value_tile(), first_key, valid_keys);
  }

  __device__ void run(const Head& head, KeySums& grad_key, ValueSums& grad_value) const {
    const Band transposed = band.transposed();
    const Range tile_keys = {first_key, first_key + config.block_n};
    const Range tiles = tiles_of(transposed.seen_by_any(tile_keys), config.block_m);
    if (tiles.begin >= tiles.end) return;
    const Range valid_queries = transposed.seen_by_any({0, transposed.rows});
    const Range unmasked =
        tile_keys.end > band.cols ? Range{0, 0} : transposed.seen_by_all(tile_keys);

    head.query.load(query_tile(tiles.begin), tiles.begin * config.block_m, valid_queries);
    head.grad_out.load(grad_out_tile(tiles.begin), tiles.begin * config.block_m, valid_queries);
    load_statistics(head, tiles.begin, valid_queries);
    copy_async_commit();
    for (int m = tiles.begin; m < tiles.end; ++m) {
      copy_async_wait_group<0>();
      __syncthreads();
      // Without a next tile, zeros are written where nothing is read.
      const Range next_queries = m + 1 < tiles.end ? valid_queries : Range{0, 0};
      if constexpr (!Shape::exchange) {
        if (m > tiles.begin) add_query_gradient(head, m - 1);
      }
      const Range tile_queries = {m * config.block_m, (m + 1) * config.block_m};
      step(head, grad_key, grad_value, m, !unmasked.covers(tile_queries), next_queries);
      if constexpr (Shape::exchange) {
        add_query_gradient(head, m);
      }
    }
    copy_async_wait_group<0>();  // the zeros too, before another head's tiles come
    __syncthreads();
    if constexpr (!Shape::exchange) add_query_gradient(head, tiles.end - 1);
  }

 private:
  __device__ void load_next(const Head& head, int m, const Range& valid) const {
    head.query.load(query_tile(m), m * config.block_m, valid);
    head.grad_out.load(grad_out_tile(m), m * config.block_m, valid);
    load_statistics(head, m, valid);
    copy_async_commit();
  }

  __device__ void load_statistics(const Head& head, int m, const Range& valid) const {
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
        copy_async_to<4>(statistics(m) + (kind * config.block_m + row) * 4, source + index,
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

  /// One tile: dK and dV, and dS^T in shared memory.
  __device__ void step(const Head& head, KeySums& grad_key, ValueSums& grad_value, int m,
                       bool masked, const Range& next_queries) const {
    const int key_row = Shape::key_row();
    const int query_col = Shape::query_warp() * Shape::warp_queries;
    const unsigned stat = statistics(m) + (query_col + MmaLane::col()) * 4;
    Scores scores;
    scores.fill(0.0f);
    {
      const auto left = WalkOf<KeyTile>::left(key_tile(), key_row);
      const auto right = WalkOf<QueryTile>::right(query_tile(m), query_col);
#pragma unroll
      for (int k = 0; k < config.head_dim / 16; ++k) {
        multiply_slice(scores, left, right, k);
        // Here, so that the arithmetic of addresses has products to fill.
        if (k == 0) load_next(head, m + 1, next_queries);
      }
    }
    if (masked) {
      apply_mask(scores, band.transposed(), first_key + key_row, m * config.block_m + query_col);
    }

    // dP - D: the products are added to -D.
    Scores slopes;
#pragma unroll
    for (int j = 0; j < n_tiles; ++j) {
      const float2 delta = load_shared_pair(stat + (2 * config.block_m + j * 8) * 4);
#pragma unroll
      for (int i = 0; i < m_tiles; ++i) {
        slopes.at[i][j][0] = slopes.at[i][j][2] = -delta.x;
        slopes.at[i][j][1] = slopes.at[i][j][3] = -delta.y;
      }
    }
    Probabilities p;
    {
      constexpr int steps = config.head_dim_v / 16;
      const auto left = WalkOf<ValueTile>::left(value_tile(), key_row);
      const auto right = WalkOf<GradOutTile>::right(grad_out_tile(m), query_col);
#pragma unroll
      for (int k = 0; k < steps; ++k) {
        multiply_slice(slopes, left, right, k);
        exponentiate_slice(head.score, scores, p, m, pieces * k / steps, pieces * (k + 1) / steps);
      }
    }
    use_scores(grad_key, grad_value, scores, slopes, p, m);
  }

  /// Of all queries, the columns that this warp adds up for dK or dV.
  template <int cols, class Tile>
  __device__ static PartialWalk<Tile, cols / 2> columns_of(const Tile& tile) {
    return {WalkOf<Tile>::left(tile, 0), Shape::query_warp()};
  }

  /// dV += P^T dO and dK += dS^T Q of this warp's queries, with an exchange then of the others'.
  /// dS^T and, with an exchange, P^T go to shared memory.
  __device__ void use_scores(KeySums& grad_key, ValueSums& grad_value, const Scores& scores,
                             const Scores& slopes, const Probabilities& p, int m) const {
    Probabilities ds;
    const int own_row = Shape::query_warp() * Shape::warp_queries;
    constexpr int pairs_v = ValueSums::n_tiles / 2, slices_v = query_steps * pairs_v;
    const auto grad_out = columns_of<2 * pairs_v>(grad_out_tile(m));
    const auto own_grad_out = grad_out.down(own_row);
#pragma unroll
    for (int slice = 0; slice < slices_v; ++slice) {
      accumulate_slice<config.dtype>(grad_value, p.at[slice / pairs_v], own_grad_out,
                                     slice / pairs_v, slice % pairs_v, slice % pairs_v);
      const int first = pieces * slice / slices_v, end = pieces * (slice + 1) / slices_v;
      if constexpr (Shape::exchange) store_slice(probability_tile(), p, first, end);
      differentiate_slice(scores, slopes, ds, first, end);
    }
    constexpr int pairs = KeySums::n_tiles / 2, slices = query_steps * pairs;
    const auto query = columns_of<2 * pairs>(query_tile(m));
    const auto own_query = query.down(own_row);
#pragma unroll
    for (int slice = 0; slice < slices; ++slice) {
      accumulate_slice<config.dtype>(grad_key, ds.at[slice / pairs], own_query, slice / pairs,
                                     slice % pairs, slice % pairs);
      store_slice(score_tile(m), ds, pieces * slice / slices, pieces * (slice + 1) / slices);
    }
    if constexpr (Shape::exchange) {
      // Found before the barrier, so that nobody waits for it after it.
      const ColumnWalk<ScoreTile> gradients = {
          opaque(WalkOf<ScoreTile>::left(score_tile(m), Shape::key_row()).base)};
      __syncthreads();
      use_others(grad_value, gradients.down(config.block_n), grad_out);  // P^T lies after dS^T
      use_others(grad_key, gradients, query);
    }
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

  /// dQ / softmax_scale += dS K, added to global memory.
  __device__ void add_query_gradient(const Head& head, int m) const {
    constexpr int rows = Shape::sum_m_tiles * 16, cols = Shape::sum_n_tiles * 8;
    constexpr int steps = config.block_n / 16;
    using Sums = QuerySums<config.head_dim>;
    const int row_part = Shape::warp() / Shape::dim_warps;
    const int col_part = Shape::warp() % Shape::dim_warps;
    const PartialWalk<ScoreTile, rows / 16> left(WalkOf<ScoreTile>::right(score_tile(m), 0),
                                                 row_part);
    const PartialWalk<KeyTile, cols / 16> right(WalkOf<KeyTile>::left(key_tile(), 0), col_part);
    unsigned a[steps][rows / 16][4];
#pragma unroll
    for (int step = 0; step < steps; ++step) {
#pragma unroll
      for (int i = 0; i < rows / 16; ++i)
        load_matrices_transposed(a[step][i], left.at(i, step * 16));
    }
    const int lane = MmaLane::lane();
    const int first_row = m * config.block_m + row_part * rows + lane / 4;
    await_own_turn(head, m);
    const Sums all{head.params.query_sums};
    float* target = all.row(opaque(head.scratch) + first_row) + Sums::offset(lane % 4 * 2) +
                    col_part * (cols / 16) * Sums::group;
    // Few columns at a time, so that additions to memory spread over the products.
#pragma unroll
    for (int pair = 0; pair < cols / 16; ++pair) {
      MmaFragment<rows / 16, 2> sums;
      sums.fill(0.0f);
#pragma unroll
      for (int step = 0; step < steps; ++step) {
        accumulate_slice<config.dtype>(sums, a[step], right, step, pair, 0);
      }
#pragma unroll
      for (int i = 0; i < rows / 16; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float (&left_half)[4] = sums.at[i][0];
          const float (&right_half)[4] = sums.at[i][1];
          reduce_add(target + (i * 16 + r * 8) * config.head_dim + pair * Sums::group,
                     make_float4(left_half[2 * r], left_half[2 * r + 1], right_half[2 * r],
                                 right_half[2 * r + 1]));
        }
      }
    }
    if constexpr (config.deterministic) {
      __syncthreads();
      if (threadIdx.x == 0) end_turn(head.turns + m);
    }
  }

  /// Waits until all earlier key tiles that see this query tile have added theirs. Blocks start in
  /// the order of their key tiles, so the one waited for is running or done.
  __device__ void await_own_turn(const Head& head, int m) const {
    if constexpr (config.deterministic) {
      const Range queries = {m * config.block_m, (m + 1) * config.block_m};
      const int turn =
          first_key / config.block_n - band.seen_by_any(queries).begin / config.block_n;
      if (threadIdx.x == 0) await_turn(head.turns + m, turn);
      __syncthreads();
    }
  }

  /// Pieces [first, end) of P = exp(S - m) / l as operands; in place of the scores what dS is to be
  /// multiplied by: P, times softcap's derivative.
  __device__ void exponentiate_slice(const ScoreOf& score, Scores& scores, Probabilities& p, int m,
                                     int first, int end) const {
    const int query_col = Shape::query_warp() * Shape::warp_queries + MmaLane::col();
    const unsigned stat = statistics(m) + query_col * 4;
#pragma unroll
    for (int piece = first; piece < end; ++piece) {
      const int i = piece % m_tiles, j = piece / m_tiles;
      const float2 shift = load_shared_pair(stat + j * 32);
      const float2 inverse = load_shared_pair(stat + (config.block_m + j * 8) * 4);
      float (&s)[4] = scores.at[i][j];
      float probability[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float row_shift = e % 2 == 0 ? shift.x : shift.y;
        const float row_inverse = e % 2 == 0 ? inverse.x : inverse.y;
        const float product = s[e];
        float value = product;
        if constexpr (!config.raw_scores) {
          value = score.value(product, m * config.block_m + query_col + j * 8 + e % 2,
                              first_key + Shape::key_row() + i * 16 + e / 2 * 8 + MmaLane::row());
          if (product == -infinity<float>) value = product;  // masked, whatever the scale's sign
        }
        probability[e] = exp2_hardware(fmaf(value, factor, -row_shift)) * row_inverse;
        s[e] = config.softcap ? probability[e] * score.derivative(product) : probability[e];
      }
      p.upper(i, j) = pack_pair<config.dtype>(probability[0], probability[1]);
      p.lower(i, j) = pack_pair<config.dtype>(probability[2], probability[3]);
    }
  }

  /// Pieces [first, end) of dS = P (dP - D), as operands.
  __device__ static void differentiate_slice(const Scores& p, const Scores& slopes,
                                             Probabilities& ds, int first, int end) {
#pragma unroll
    for (int piece = first; piece < end; ++piece) {
      const int i = piece % m_tiles, j = piece / m_tiles;
      float product[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) product[e] = p.at[i][j][e] * slopes.at[i][j][e];
      ds.upper(i, j) = pack_pair<config.dtype>(product[0], product[1]);
      ds.lower(i, j) = pack_pair<config.dtype>(product[2], product[3]);
    }
  }

  /// Pieces [first, end) of an operand into a transposed score tile.
  __device__ static void store_slice(const ScoreTile& tile, const Probabilities& p, int first,
                                     int end) {
    const int row = Shape::key_row() + MmaLane::row();
    const int col = Shape::query_warp() * Shape::warp_queries + MmaLane::col();
#pragma unroll
    for (int piece = first; piece < end; ++piece) {
      const int i = piece % m_tiles, j = piece / m_tiles;
      store_shared(tile.pair(row + i * 16, col + j * 8), p.upper(i, j));
      store_shared(tile.pair(row + i * 16 + 8, col + j * 8), p.lower(i, j));
    }
  }
};

}  // namespace cupyflash
