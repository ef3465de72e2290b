// Turns of key tiles to add to a query tile's dQ, where it is to have the same bits in every run:
// threads that wait for other blocks, and let others go on, while the consumers compute.
//
//   announces | waits for another block |
//   adds      |                         | dQ: consumers, or the reducer |
//   ends      |                         |                               | lets the next block go
//
// No block waits for one that cannot start. Turns follow the places of key tiles (`key_tile_at`),
// and each block takes one. Blocks start in the order of their numbers; all devices do so, though
// CUDA does not promise it (else a block would have to draw its number when it starts): of the
// blocks that are not done, the one that started first has all its turns, whichever others are
// running.
//
// Blocks seldom wait at all. They pass the queries of a head in one order, each behind the one that
// adds before it. Heads are side by side, so that a block that starts when another ends, behind
// its neighbours, is of a key tile whose turns come behind theirs. With a band key tiles come from
// the last to the first: a block starts at its diagonal, where all later keys have had their turns,
// or are about to have them, and earlier ones would come by much later.
#pragma once

#include "arch/reduce.cuh"
#include "backward/pipeline_wgmma.cuh"
#include "backward/walk_wgmma.cuh"

namespace cupyflash {

template <WgmmaBackwardConfig config>
struct BackwardTurns {
  const WgmmaBackwardParams& params;
  BackwardPipeline<config> pipeline;

  /// Tells those who add when the block's turns come. The next one is awaited while one lasts, but
  /// announced when all have noticed its end: two phases at once would be none to who waits for the
  /// first.
  __device__ void announce() const {
    const AsyncBarrier used = config.direct ? pipeline.turn_used() : pipeline.sums_empty();
    unsigned round = 0;
    BackwardWalk<config> walk(params, first_place<config>(params));
#pragma unroll 1
    for (; walk.exists(); walk.advance(), round ^= 1) {
      await_turn(walk.turns(params), walk.own_turn());
      used.wait(round ^ 1);
      pipeline.turn().arrive();
    }
  }

  /// Ends each turn when the consumers have added; the reducer ends its turns itself.
  __device__ void end() const {
    unsigned round = 0;
    BackwardWalk<config> walk(params, first_place<config>(params));
#pragma unroll 1
    for (; walk.exists(); walk.advance(), round ^= 1) {
      pipeline.sums_full().wait(round);
      pipeline.turn_used().arrive();
      end_turn(walk.turns(params));
    }
  }
};

}  // namespace cupyflash
