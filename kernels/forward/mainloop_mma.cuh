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

#include "attention/dropout.cuh"
#include "attention/mask_mma.cuh"
#include "attention/tile_walk.cuh"
#include "forward/finish_scores_mma.cuh"
#include "tile/load_swizzled.cuh"
#include "tile/multiply_mma.cuh"

namespace cupyflash {

template <MmaForwardConfig config>
struct MmaForwardTurns;

template <MmaForwardConfig config>
struct MmaForwardMainloop {
  using Shape = MmaForwardShape<config>;
  using Scores = typename Shape::Scores;
  using QueryTile = typename Shape::QueryTile;
  using KeyTile = typename Shape::KeyTile;
  using ValueTile = typename Shape::ValueTile;
  using State = MmaForwardState<config>;
  using Bias = typename Shape::Bias;
  using Walk = TileWalk<config.visibility, 2>;
  template <class Tile>
  using Loader = SwizzledLoader<Tile, config.threads(), config.load_width, Element<config.dtype>>;
  static constexpr int m_tiles = Shape::m_tiles;
  static constexpr int n_tiles = Shape::n_tiles;
  static constexpr int steps = config.head_dim / 16;    // of S = Q K^T along head_dim
  static constexpr int steps_v = config.block_n / 16;   // of O += P V along the keys
  static constexpr int pairs_v = Shape::n_tiles_v / 2;  // of column pieces of O
  static constexpr int pieces = m_tiles * n_tiles;      // of scores, for slicing
  static constexpr int unit = config.dropout ? 2 : 1;   // pieces that share random numbers
  static constexpr int units = pieces / unit;           // of the exponential
  // Units under S, the others under the first P V.
  static constexpr int early = units / 2 + units % 2;
  static_assert(early >= units / steps_v, "the first P V needs them");

  using Probabilities = MmaOperand<m_tiles, n_tiles>;

  unsigned shared;  // address of the block's shared memory
  Loader<QueryTile> query;
  Loader<KeyTile> key;
  Loader<ValueTile> value;
  Band band;
  Score<config> score;
  MmaScore<config> score_of;
  ElementMask<config> mask;
  TileStates<config.visibility> states;
  Dropout<config> dropout;
  int first_query;  // of the tile

  __device__ static int warp_row() { return warp_index() * Shape::warp_rows; }

  __device__ QueryTile query_tile() const { return {shared}; }
  __device__ KeyTile key_tile(int n) const {
    return {shared + Shape::query_bytes + (n & 1) * KeyTile::bytes};
  }
  __device__ ValueTile value_tile(int n) const {
    return {shared + Shape::query_bytes + 2 * KeyTile::bytes + (n & 1) * ValueTile::bytes};
  }

  __device__ Bias bias_tile(int n) const {
    return {shared + Shape::bias_offset + (n & 1) * Bias::bytes};
  }

  __device__ void run(State& state) const {
    const Range seen = band.seen_by_any({first_query, first_query + config.block_m});
    const Range tiles = tiles_of(seen, config.block_n);
    state.sums.fill(0.0f);
    Walk walk(states, tiles);
    if (!walk.exists(0)) return;
    // What no query of the tile sees may hold NaN, which 0 * NaN would spread: it is not loaded.
    // Without a window that is the same for all tiles, and takes fewer registers when told so.
    const Range valid_keys = config.window ? seen : band.seen_by_any({0, band.rows});
    const int warp_query = first_query + warp_row();
    Range unmasked = band.seen_by_all({warp_query, warp_query + Shape::warp_rows});
    // Rows that do not exist see nothing, as the others may.
    if (config.hides() && warp_query + Shape::warp_rows > band.rows) unmasked = {0, 0};

    query.load(query_tile(), first_query, {0, band.rows});
    key.load(key_tile(walk.slot()), walk.tile(0) * config.block_n, valid_keys);
    load_bias(walk.slot(), walk.tile(0));
    copy_async_commit();
    if (walk.exists(1)) {
      key.load(key_tile(walk.slot() + 1), walk.tile(1) * config.block_n, valid_keys);
      load_bias(walk.slot() + 1, walk.tile(1));
    }
    value.load(value_tile(walk.slot()), walk.tile(0) * config.block_n, valid_keys);
    copy_async_commit();
    copy_async_wait_group<1>();
    __syncthreads();

    const Queries queries(*this);
    if constexpr (config.turns) {
      MmaForwardTurns<config>{*this, queries, valid_keys, unmasked}.run(state, walk);
      return;
    }
    Scores even, odd;
    bool hidden = first_scores(state, queries, even, walk, unmasked);
    while (walk.exists(1)) {
      hidden = step(state, queries, even, odd, walk, hidden, valid_keys, unmasked);
      walk.advance();
      if (walk.ends(1)) {
        even = odd;
        break;
      }
      hidden = step(state, queries, odd, even, walk, hidden, valid_keys, unmasked);
      walk.advance();
    }
    last_values(state, even, walk, hidden);
  }

 private:
  friend MmaForwardTurns<config>;

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

  /// All of O += P V, without values that no row sees.
  __device__ static void accumulate_seen(State& state, const Probabilities& p,
                                         const ColumnWalk<ValueTile>& values) {
    UsedColumns<steps_v> used;
#pragma unroll
    for (int step = 0; step < steps_v; ++step) used.see(p.at[step], step);
    used.share();
#pragma unroll
    for (int slice = 0; slice < steps_v * pairs_v; ++slice) {
      const int step = slice / pairs_v, pair = slice % pairs_v;
      accumulate_used_slice<config.dtype>(state.sums, p.at[step], values, used, step, pair, pair);
    }
  }

  /// Units [first, end) of P = exp(S) of tile n.
  __device__ void exponentiate_slice(State& state, const Scores& scores, Probabilities& p, int n,
                                     int first, int end) const {
#pragma unroll
    for (int u = first; u < end; ++u) {
      const int i = u % m_tiles, j = u / m_tiles * unit;
      if constexpr (config.dropout) {
        const int query_index = first_query + warp_row() + i * 16 + MmaLane::row();
        const int key_index = n * config.block_n + j * 8 + MmaLane::col();
        bool keep[2][4];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const uint4 words = dropout.words(query_index, key_index + c);
          keep[0][c] = dropout.keeps(words.x);
          keep[1][c] = dropout.keeps(words.y);
          keep[0][2 + c] = dropout.keeps(words.z);
          keep[1][2 + c] = dropout.keeps(words.w);
        }
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          state.softmax.template exponentiate<config.dtype>(
              i, scores.at[i][j + k], p.upper(i, j + k), p.lower(i, j + k), keep[k]);
        }
      } else {
        state.softmax.template exponentiate<config.dtype>(i, scores.at[i][j], p.upper(i, j),
                                                          p.lower(i, j));
      }
    }
  }

  __device__ static void see_slice(State& state, const Scores& scores, int first, int end) {
#pragma unroll
    for (int piece = first; piece < end; ++piece) {
      state.softmax.see(piece % m_tiles, scores.at[piece % m_tiles][piece / m_tiles]);
    }
  }

  __device__ void load_bias(int slot, int n) const {
    if constexpr (config.bias) {
      BiasLoader<Bias, config.threads(), config.bias_width>::load(bias_tile(slot), score.bias,
                                                                  first_query, n * config.block_n);
    }
  }

  /// What the products of tile n are added to.
  __device__ void start_scores(Scores& scores, int n) const {
    scores.fill(0.0f);
    if constexpr (config.alibi_first()) {
      start_with_alibi<config>(scores, score_of, first_query + warp_row(), n * config.block_n);
    }
  }

  /// From products to scores, masks included. Returns, alike in all lanes, whether something is
  /// hidden that no band hides.
  __device__ bool finish_scores(Scores& scores, int slot, int n, bool mixed,
                                const Range& unmasked) const {
    const int first_key = n * config.block_n;
    const int warp_query = first_query + warp_row();
    bool hidden = false;
    if constexpr (!config.raw_scores) {
      hidden = finish_at_once<config>(scores, score, score_of, bias_tile(slot), warp_row(),
                                      warp_query, first_key);
    }
    if (!unmasked.covers({first_key, first_key + config.block_n})) {
      apply_mask(scores, band, warp_query, first_key);
    }
    if constexpr (config.masked()) {
      if (mixed || !config.visibility) {
        hide_unseen<false>(scores, mask, warp_query, first_key);
        hidden = true;
      }
    }
    return hidden;
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

  __device__ bool first_scores(State& state, const Queries& queries, Scores& scores,
                               const Walk& walk, const Range& unmasked) const {
    const auto keys = WalkOf<KeyTile>::right(key_tile(walk.slot()), 0);
    start_scores(scores, walk.tile(0));
#pragma unroll
    for (int k = 0; k < steps; ++k) multiply_slice(scores, queries, keys, k);
    const bool hidden = finish_scores(scores, walk.slot(), walk.tile(0), walk.mixed(0), unmasked);
    see_slice(state, scores, 0, pieces);
    if (state.softmax.must_follow()) rescale(state);
    return hidden;
  }

  /// P and O of this tile, whose scores are given; scores of the next one.
  __device__ bool step(State& state, const Queries& queries, const Scores& scores, Scores& next,
                       const Walk walk, bool hidden, const Range& valid_keys,
                       const Range& unmasked) const {
    const int slot = walk.slot(), n = walk.tile(0);
    copy_async_wait_group<0>();
    __syncthreads();
    // Without such a tile, zeros are written where nothing is read.
    const Range next_keys = walk.exists(2) ? valid_keys : Range{0, 0};

    Probabilities p;
    start_scores(next, walk.ahead_of(n, 1));
    const auto keys = WalkOf<KeyTile>::right(key_tile(slot + 1), 0);
#pragma unroll
    for (int k = 0; k < steps; ++k) {
      multiply_slice(next, queries, keys, k);
      // Not before, so that the arithmetic of addresses has products to fill.
      if (k == 0) key.load(key_tile(slot), walk.ahead_of(n, 2) * config.block_n, next_keys);
      if (k == 1)
        value.load(value_tile(slot + 1), walk.ahead_of(n, 1) * config.block_n, valid_keys);
      if (k == 1) load_bias(slot, walk.ahead_of(n, 2));
      exponentiate_slice(state, scores, p, n, early * k / steps, early * (k + 1) / steps);
    }
    copy_async_commit();
    const bool next_hidden =
        finish_scores(next, slot + 1, walk.ahead_of(n, 1), walk.mixed(1), unmasked);

    const auto values = WalkOf<ValueTile>::left(value_tile(slot), 0);
    if (hidden) {
      exponentiate_slice(state, scores, p, n, early, units);
      accumulate_seen(state, p, values);
      see_slice(state, next, 0, pieces);
    } else {
      constexpr int slices = steps_v * pairs_v;
#pragma unroll
      for (int slice = 0; slice < slices; ++slice) {
        accumulate(state, p, values, slice);
        const int late = minimum(slice, pairs_v);
        const int late_end = minimum(slice + 1, pairs_v);
        exponentiate_slice(state, scores, p, n, early + (units - early) * late / pairs_v,
                           early + (units - early) * late_end / pairs_v);
        see_slice(state, next, pieces * slice / slices, pieces * (slice + 1) / slices);
      }
    }
    if (state.softmax.must_follow()) rescale(state);
    return next_hidden;
  }

  __device__ void last_values(State& state, const Scores& scores, const Walk& walk,
                              bool hidden) const {
    Probabilities p;
    exponentiate_slice(state, scores, p, walk.tile(0), 0, units);
    copy_async_wait_group<0>();
    __syncthreads();
    const auto values = WalkOf<ValueTile>::left(value_tile(walk.slot()), 0);
    if (hidden) {
      accumulate_seen(state, p, values);
      return;
    }
#pragma unroll
    for (int slice = 0; slice < steps_v * pairs_v; ++slice) {
      accumulate(state, p, values, slice);
    }
  }
};

}  // namespace cupyflash
