// The forward's loop over key tiles on Hopper where a warpgroup has one product after the other.
//
//   tensor     | S1(n)       | O2 += P2 V | S3(n) | O1 += P1 V(n) | S2(n) | O3 += P3 V | S1(n+1) |
//   group 1    | issue, wait | exp S1(n), round P1 | issue, wait | add to O1           | issue   |
//
// Scores and a tile's own sums are then never alive together, and take the same registers, so that
// three groups fit that overlap one another instead. With `turns`, one to form scores lasts until
// these are there: two groups at once would both wait for twice as long.
#pragma once

#include "forward/mainloop_wgmma.cuh"

namespace cupyflash {

template <WgmmaForwardConfig config>
struct ApartForwardConsumer {
  using Consumer = ForwardConsumer<config>;
  using State = typename Consumer::State;
  using Walk = typename Consumer::Walk;
  static_assert(Consumer::float8 && config.sums_by_tile, "earlier sums would be let go");

  const Consumer& consumer;

  /// All of a query tile. Returns whether there is another one.
  __device__ bool attend(State& state, Walk& walk) const {
    state.queries.take(consumer.pipeline, consumer.warp_row);
    consumer.take_factor(state, walk);
    step(state, walk, Consumer::is_masked(walk));
    while (!walk.last()) {
      --walk.n;
      // Without a window only the first tile, which has the last keys, can end before its end.
      step(state, walk, config.window && Consumer::is_masked(walk));
    }
    const TileIndex tile = walk.tile;
    const int unseen = walk.trailing();
    const bool more = walk.next_query_tile();
    consumer.finish(state, tile);
    consumer.pass_over(state, unseen);
    return more;
  }

 private:
  /// P of the walk's key tile, and O += P V.
  __device__ void step(State& state, const Walk& walk, bool masked) const {
    forget_all(state.scores);
    consumer.await_turn();
    consumer.start_scores(state);
    await_products<0>();
    consumer.pass_turn();
    const bool follows = consumer.find_probabilities(state, walk, masked);
    if (follows) Consumer::rescale(state.sums, state.correction);
    consumer.round(state);
    forget_all(Consumer::sums_of_tile(state));
    consumer.start_sums(state);
    await_products<0>();
    consumer.end_sums(state);
  }

  template <class Fragment>
  __device__ static void forget_all(Fragment& fragment) {
#pragma unroll
    for (int j = 0; j < Fragment::n_tiles; ++j) forget(fragment.at[0][j]);
  }
};

}  // namespace cupyflash
