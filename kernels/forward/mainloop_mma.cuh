// The forward's loop over key tiles on tensor cores by mma.sync.
//
//   barrier   |                               |                               |
//   tensor    | S(1) = Q K(1)^T | O += P(0) V | S(2) = Q K(2)^T | O += P(1) V |
//   ordinary  | P(0) = exp S(0) | max S(1)    | P(1) = exp S(1) | max S(2)    |
//   copies    | K(2), V(1)----------------->  | K(3), V(2)----------------->  |
//
// The products wait for fixed latencies, which the softmax of another tile fills: both are cut into
// slices and written alternately. So tiles are narrow (two sets of scores are alive), and K and V
// have two buffers each, refilled once a tile.
#pragma once

#include "attention/config_mma.cuh"
#include "attention/mask_mma.cuh"
#include "attention/softmax_mma.cuh"
#include "tile/load_swizzled.cuh"
#include "tile/multiply_mma.cuh"

namespace cupyflash {

template <MmaForwardConfig config>
struct MmaForwardShape {
  static constexpr int warp_rows = config.block_m / config.warps;
  static constexpr int m_tiles = warp_rows / 16;
  static constexpr int n_tiles = config.block_n / 8;
  static constexpr int n_tiles_v = config.head_dim_v / 8;
  static constexpr int widest_dim =
      config.head_dim > config.head_dim_v ? config.head_dim : config.head_dim_v;
  static_assert(m_tiles * 16 * config.warps == config.block_m && config.block_n % 16 == 0);

  using Scores = MmaFragment<m_tiles, n_tiles>;
  using Sums = MmaFragment<m_tiles, n_tiles_v>;
  using QueryTile = SwizzledTile<config.block_m, config.head_dim>;
  using KeyTile = SwizzledTile<config.block_n, config.head_dim>;
  using ValueTile = SwizzledTile<config.block_n, config.head_dim_v>;
  using OutTile = SwizzledTile<config.block_m, config.head_dim_v>;

  // Shared memory: the query tile, later the output's; two key tiles; two value tiles.
  static constexpr int query_bytes = config.block_m * widest_dim * 2;
  static constexpr int bytes = query_bytes + 2 * (KeyTile::bytes + ValueTile::bytes);
};

/// What a warp knows of its rows: m, l and the unnormalised output.
template <MmaForwardConfig config>
struct MmaForwardState {
  using Shape = MmaForwardShape<config>;
  MmaSoftmax<Shape::m_tiles> softmax;
  typename Shape::Sums sums;
};

template <MmaForwardConfig config>
struct MmaForwardMainloop {
  using Shape = MmaForwardShape<config>;
  using Scores = typename Shape::Scores;
  using QueryTile = typename Shape::QueryTile;
  using KeyTile = typename Shape::KeyTile;
  using ValueTile = typename Shape::ValueTile;
  using State = MmaForwardState<config>;
  template <class Tile>
  using Loader = SwizzledLoader<Tile, config.threads(), config.load_width, Element<config.dtype>>;
  static constexpr int m_tiles = Shape::m_tiles;
  static constexpr int n_tiles = Shape::n_tiles;
  static constexpr int steps = config.head_dim / 16;     // of S = Q K^T along head_dim
  static constexpr int steps_v = config.block_n / 16;    // of O += P V along the keys
  static constexpr int pairs_v = Shape::n_tiles_v / 2;   // of column pieces of O
  static constexpr int pieces = m_tiles * n_tiles;       // of scores, for slicing
  static constexpr int early = pieces / 2 + pieces % 2;  // under S, the others under the first P V
  static_assert(early >= pieces / steps_v, "the first P V needs them");

  using Probabilities = MmaOperand<m_tiles, n_tiles>;

  unsigned shared;  // address of the block's shared memory
  Loader<QueryTile> query;
  Loader<KeyTile> key;
  Loader<ValueTile> value;
  Band band;
  Score<config> score;
  int first_query;  // of the tile

  __device__ static int warp_row() { return warp_index() * Shape::warp_rows; }

  __device__ QueryTile query_tile() const { return {shared}; }
  __device__ KeyTile key_tile(int n) const {
    return {shared + Shape::query_bytes + (n & 1) * KeyTile::bytes};
  }
  __device__ ValueTile value_tile(int n) const {
    return {shared + Shape::query_bytes + 2 * KeyTile::bytes + (n & 1) * ValueTile::bytes};
  }

  __device__ void run(State& state) const {
    const Range tile_queries = {first_query, first_query + config.block_m};
    const Range tiles = tiles_of(band.seen_by_any(tile_queries), config.block_n);
    state.sums.fill(0.0f);
    if (tiles.begin >= tiles.end) return;
    // What no query of the head sees may hold NaN, which 0 * NaN would spread: it is not loaded.
    const Range valid_keys = band.seen_by_any({0, band.rows});
    const int warp_query = first_query + warp_row();
    const Range unmasked = band.seen_by_all({warp_query, warp_query + Shape::warp_rows});

    query.load(query_tile(), first_query, {0, band.rows});
    key.load(key_tile(tiles.begin), tiles.begin * config.block_n, valid_keys);
    copy_async_commit();
    if (tiles.begin + 1 < tiles.end) {
      key.load(key_tile(tiles.begin + 1), (tiles.begin + 1) * config.block_n, valid_keys);
    }
    value.load(value_tile(tiles.begin), tiles.begin * config.block_n, valid_keys);
    copy_async_commit();
    copy_async_wait_group<1>();
    __syncthreads();

    const Queries queries(*this);
    Scores even, odd;
    first_scores(state, queries, even, tiles.begin, unmasked);
    int n = tiles.begin;
    while (n + 1 < tiles.end) {
      step(state, queries, even, odd, n, tiles.end, valid_keys, unmasked);
      if (++n + 1 == tiles.end) {
        even = odd;
        break;
      }
      step(state, queries, odd, even, n, tiles.end, valid_keys, unmasked);
      ++n;
    }
    last_values(state, even, n);
  }

 private:
  /// The warp's query rows as operand `a`: the first columns kept, the others read again for every
  /// key tile.
  struct Queries {
    static constexpr int kept_steps = config.kept_steps < steps ? config.kept_steps : steps;
    ColumnWalk<QueryTile> walk;
    unsigned kept[kept_steps > 0 ? kept_steps : 1][m_tiles][4];

    __device__ explicit Queries(const MmaForwardMainloop& loop)
        : walk(WalkOf<QueryTile>::left(loop.query_tile(), warp_row())) {
#pragma unroll
      for (int step = 0; step < kept_steps; ++step) read(step, kept[step]);
    }
    __device__ void read(int step, unsigned (&fragment)[m_tiles][4]) const {
#pragma unroll
      for (int i = 0; i < m_tiles; ++i) load_matrices(fragment[i], walk.at(step, i * 16));
    }
  };

  /// 16 columns' part of S = Q K^T.
  __device__ static void multiply_slice(Scores& scores, const Queries& queries,
                                        const ColumnWalk<KeyTile>& keys, int step) {
    unsigned a[m_tiles][4];
    if (step < Queries::kept_steps) {
#pragma unroll
      for (int i = 0; i < m_tiles; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) a[i][e] = queries.kept[step][i][e];
      }
    } else {
      queries.read(step, a);
    }
    cupyflash::multiply_slice<config.dtype>(scores, a, keys, step);
  }

  /// Slice `slice` of O += P V: 16 keys' part of two column pieces.
  __device__ static void accumulate(State& state, const Probabilities& p,
                                    const ColumnWalk<ValueTile>& values, int slice) {
    const int step = slice / pairs_v, pair = slice % pairs_v;
    accumulate_slice<config.dtype>(state.sums, p.at[step], values, step, pair, pair);
  }

  /// Pieces [first, end) of P = exp(S).
  __device__ static void exponentiate_slice(State& state, const Scores& scores, Probabilities& p,
                                            int first, int end) {
#pragma unroll
    for (int piece = first; piece < end; ++piece) {
      const int i = piece % m_tiles, j = piece / m_tiles;
      state.softmax.template exponentiate<config.dtype>(i, scores.at[i][j], p.upper(i, j),
                                                        p.lower(i, j));
    }
  }

  __device__ static void see_slice(State& state, const Scores& scores, int first, int end) {
#pragma unroll
    for (int piece = first; piece < end; ++piece) {
      state.softmax.see(piece % m_tiles, scores.at[piece % m_tiles][piece / m_tiles]);
    }
  }

  /// From products to scores: what is left to do of scale, softcap and ALiBi, and the mask.
  __device__ void finish_scores(Scores& scores, int n, const Range& unmasked) const {
    const int first_key = n * config.block_n;
    const int warp_query = first_query + warp_row();
    if constexpr (!config.raw_scores) {
#pragma unroll
      for (int i = 0; i < m_tiles; ++i) {
#pragma unroll
        for (int j = 0; j < n_tiles; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            scores.at[i][j][e] =
                score.value(scores.at[i][j][e], warp_query + i * 16 + e / 2 * 8 + MmaLane::row(),
                            first_key + j * 8 + e % 2 + MmaLane::col());
          }
        }
      }
    }
    if (!unmasked.covers({first_key, first_key + config.block_n})) {
      apply_mask(scores, band, warp_query, first_key);
    }
  }

  __device__ static void rescale(State& state) {
    float correction[m_tiles][2];
    state.softmax.follow(correction);
#pragma unroll
    for (int i = 0; i < m_tiles; ++i) {
#pragma unroll
      for (int j = 0; j < Shape::n_tiles_v; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) state.sums.at[i][j][e] *= correction[i][e >> 1];
      }
    }
  }

  __device__ void first_scores(State& state, const Queries& queries, Scores& scores, int n,
                               const Range& unmasked) const {
    const auto keys = WalkOf<KeyTile>::right(key_tile(n), 0);
    scores.fill(0.0f);
#pragma unroll
    for (int k = 0; k < steps; ++k) multiply_slice(scores, queries, keys, k);
    finish_scores(scores, n, unmasked);
    see_slice(state, scores, 0, pieces);
    if (state.softmax.reduce()) rescale(state);
  }

  /// P and O of tile n, whose scores are given; scores of tile n + 1.
  __device__ void step(State& state, const Queries& queries, const Scores& scores, Scores& next,
                       int n, int end, const Range& valid_keys, const Range& unmasked) const {
    copy_async_wait_group<0>();
    __syncthreads();
    // Without such a tile, zeros are written where nothing is read.
    const Range next_keys = n + 2 < end ? valid_keys : Range{0, 0};

    Probabilities p;
    next.fill(0.0f);
    const auto keys = WalkOf<KeyTile>::right(key_tile(n + 1), 0);
#pragma unroll
    for (int k = 0; k < steps; ++k) {
      multiply_slice(next, queries, keys, k);
      // Not before, so that the arithmetic of addresses has products to fill.
      if (k == 0) key.load(key_tile(n), (n + 2) * config.block_n, next_keys);
      if (k == 1) value.load(value_tile(n + 1), (n + 1) * config.block_n, valid_keys);
      exponentiate_slice(state, scores, p, early * k / steps, early * (k + 1) / steps);
    }
    copy_async_commit();
    finish_scores(next, n + 1, unmasked);

    const auto values = WalkOf<ValueTile>::left(value_tile(n), 0);
    constexpr int slices = steps_v * pairs_v;
#pragma unroll
    for (int slice = 0; slice < slices; ++slice) {
      accumulate(state, p, values, slice);
      const int late = minimum(slice, pairs_v);
      const int late_end = minimum(slice + 1, pairs_v);
      exponentiate_slice(state, scores, p, early + (pieces - early) * late / pairs_v,
                         early + (pieces - early) * late_end / pairs_v);
      see_slice(state, next, pieces * slice / slices, pieces * (slice + 1) / slices);
    }
    if (state.softmax.reduce()) rescale(state);
  }

  __device__ void last_values(State& state, const Scores& scores, int n) const {
    Probabilities p;
    exponentiate_slice(state, scores, p, 0, pieces);
    copy_async_wait_group<0>();
    __syncthreads();
    const auto values = WalkOf<ValueTile>::left(value_tile(n), 0);
#pragma unroll
    for (int slice = 0; slice < steps_v * pairs_v; ++slice) {
      accumulate(state, p, values, slice);
    }
  }
};

}  // namespace cupyflash
