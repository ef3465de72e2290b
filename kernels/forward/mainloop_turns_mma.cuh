// The forward's loop over key tiles where two groups of warps multiply in turns.
//
//   group 0 | S(1) = Q K(1)^T, O += P(0) V | P(1) = exp S(1)            | S(2), O += P(1) V  |
//   group 1 | P(0) = exp S(0)              | S(1), O += P(0) V          | P(1) = exp S(1)    |
//   copies  | K(2), V(1), half of each---> | the other halves---------> | K(3), V(2)         |
//
// Every scheduler has a warp of either group: one feeds the tensor cores, while the other one has
// all the ordinary arithmetic of a tile, which may take as long as the products without being seen.
// One block a multiprocessor, and one set of scores alive.
#pragma once

#include "arch/named_barrier.cuh"
#include "forward/mainloop_mma.cuh"

namespace cupyflash {

template <MmaForwardConfig config>
struct MmaForwardTurns {
  using Mainloop = MmaForwardMainloop<config>;
  using Scores = typename Mainloop::Scores;
  using State = typename Mainloop::State;
  using Probabilities = typename Mainloop::Probabilities;
  using Walk = typename Mainloop::Walk;
  static constexpr int m_tiles = Mainloop::m_tiles;
  static constexpr int steps_v = Mainloop::steps_v;
  static constexpr int pairs_v = Mainloop::pairs_v;
  // Column pairs of the last 16 keys whose products are left when the turn is passed on.
  static constexpr int left = pairs_v < 8 ? pairs_v / 2 : 4;
  static_assert(config.warps % 8 == 0, "groups with a warp for each scheduler");
  static_assert(!config.bias, "a group would overwrite the bias that the other one reads");

  const Mainloop& loop;
  const typename Mainloop::Queries& queries;
  const Range& valid_keys;
  const Range& unmasked;

  __device__ void run(State& state, Walk& walk) const {
    Scores scores;
    Probabilities p;
    if (group() == 1) pass_turn();
    loop.start_scores(scores, walk.tile(0));
    take_turn();
    multiply(scores, walk.slot(), [](int) {});
    copy_async_wait_group<0>();
    pass_turn();
    bool hidden = soften(state, scores, p, walk, 0);
    while (walk.exists(1)) {
      const int slot = walk.slot(), n = walk.tile(0);
      // Without such a tile, zeros are written where nothing is read.
      const Range next_keys = walk.exists(2) ? valid_keys : Range{0, 0};
      loop.start_scores(scores, walk.ahead_of(n, 1));
      take_turn();
      multiply(scores, slot + 1, [&](int step) {
        // Both groups are done with these tiles. Addresses have products to fill.
        if (step == 0)
          loop.key.load(loop.key_tile(slot), walk.ahead_of(n, 2) * config.block_n, next_keys);
        if (step == 1)
          loop.value.load(loop.value_tile(slot + 1), walk.ahead_of(n, 1) * config.block_n,
                          valid_keys);
      });
      copy_async_commit();
      add_values(state, p, slot, hidden, true);
      hidden = soften(state, scores, p, walk, 1);
      walk.advance();
    }
    take_turn();
    add_values(state, p, walk.slot(), hidden, group() == 0);
    __syncwarp();  // lanes have read rows of the query tile that others write out into
  }

 private:
  __device__ static int group() { return warp_index() / (config.warps / 2); }
  __device__ static void take_turn() { await_barrier<config.threads()>(1 + group()); }
  __device__ static void pass_turn() { arrive_at_barrier<config.threads()>(2 - group()); }

  /// S = Q K^T, with what else there is to do after each 16 columns.
  template <class Beside>
  __device__ void multiply(Scores& scores, int slot, const Beside& beside) const {
    const auto keys = WalkOf<typename Mainloop::KeyTile>::right(loop.key_tile(slot), 0);
#pragma unroll
    for (int step = 0; step < Mainloop::steps; ++step) {
      Mainloop::multiply_slice(scores, queries, keys, step);
      beside(step);
    }
  }

  /// O += P V. Passes the turn on when nothing is left to be read: the other group's first reads
  /// are then beside the last products.
  __device__ void add_values(State& state, const Probabilities& p, int slot, bool hidden,
                             bool awaited) const {
    const auto values = WalkOf<typename Mainloop::ValueTile>::left(loop.value_tile(slot), 0);
    if (hidden) {
      Mainloop::accumulate_seen(state, p, values);
      copy_async_wait_group<0>();
      if (awaited) pass_turn();
      return;
    }
#pragma unroll
    for (int slice = 0; slice < steps_v * pairs_v - left; ++slice) {
      Mainloop::accumulate(state, p, values, slice);
    }
    // A product of each, so that its operand has arrived when the turn is passed on.
    constexpr int step = steps_v - 1, first = pairs_v - left;
    unsigned b[left][4];
#pragma unroll
    for (int k = 0; k < left; ++k) {
      load_matrices_transposed(b[k], values.at(first + k, step * 16));
      multiply_piece(state, p.at[step][0], b[k], 0, first + k, 0);
    }
    copy_async_wait_group<0>();
    if (awaited) pass_turn();
    const unsigned zero =
        zero_from_here(loop.query_tile().chunk(Mainloop::warp_row() + MmaLane::row(), 0));
    unsigned a[m_tiles][4];
#pragma unroll
    for (int i = 0; i < m_tiles; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) a[i][e] = p.at[step][i][e] | zero;
    }
#pragma unroll
    for (int k = 0; k < left; ++k) {
#pragma unroll
      for (int i = 0; i < m_tiles; ++i) {
        if (i > 0) multiply_piece(state, a[i], b[k], i, first + k, 0);
        multiply_piece(state, a[i], b[k], i, first + k, 1);
      }
    }
  }

  /// 16 keys' part of 16 rows and 8 columns.
  __device__ static void multiply_piece(State& state, const unsigned (&a)[4],
                                        const unsigned (&b)[4], int i, int pair, int half) {
    mma_16x8x16<config.dtype>(state.sums.at[i][2 * pair + half], a, b[2 * half], b[2 * half + 1]);
  }

  /// Products of a tile become probabilities; says whether some are hidden, as `finish_scores`.
  __device__ bool soften(State& state, Scores& scores, Probabilities& p, const Walk& walk,
                         int ahead) const {
    const int n = walk.tile(ahead);
    const bool hidden =
        loop.finish_scores(scores, walk.slot() + ahead, n, walk.mixed(ahead), unmasked);
    Mainloop::see_slice(state, scores, 0, Mainloop::pieces);
    if (state.softmax.must_follow()) Mainloop::rescale(state);
    loop.exponentiate_slice(state, scores, p, n, 0, Mainloop::units);
    return hidden;
  }
};

}  // namespace cupyflash
