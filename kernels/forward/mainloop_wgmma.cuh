// The forward's loop over key tiles on Hopper: what a consumer warpgroup does.
//
//   tensor     | S1(n+1), O1 += P1 V(n) | S2(n+1), O2 += P2 V(n) | S1(n+2), O1 += P1 V(n+1) |
//   group 1    | issue, wait for S1     | exp S1(n+1)   rescale, | issue, wait for S1       |
//              |                        |               round P1 |                          |
//   group 2    | exp S2(n)    rescale,  | issue, wait for S2     | exp S2(n+1)    rescale,  |
//              |              round P2  |                        |                round P2  |
//   copies     | K(n+2) ------------->  | V(n+1) ------------->  | K(n+3) ------------->    |
//
// Groups take turns to issue products (named barriers; without `turns` they come as they like):
// while one waits for the tensor cores, the others compute exponentials. Where `eager`, these do
// not wait for the tile's maxima, and sums are rescaled a step later. Within a group, scores of the
// next tile are asked for before the values of this one are added, so that exponentials start while
// that addition still runs. A group goes on to its next query tile in the same rhythm: the first
// scores of the next tile are formed beside the last sums of this one, unless there are key tiles
// between that it does not see, or not `joined`. A warpgroup whose products have a left operand in
// registers cannot go on until most are done. Where P is in shared memory it goes on at once, and
// three groups have registers enough for wide tiles.
#pragma once

#include "arch/bulk.cuh"
#include "arch/named_barrier.cuh"
#include "arch/opaque.cuh"
#include "forward/epilogue_wgmma.cuh"
#include "forward/finish_scores_wgmma.cuh"
#include "forward/queries_wgmma.cuh"
#include "tile/multiply_wgmma.cuh"

namespace cupyflash {

template <WgmmaForwardConfig config>
struct ApartForwardConsumer;

template <WgmmaForwardConfig config>
struct ForwardConsumer {
  using Shape = WgmmaForwardShape<config>;
  using Scores = typename Shape::Scores;
  using Sums = typename Shape::Sums;
  static constexpr bool float8 = is_float8(config.dtype);
  using Probabilities =
      typename Either<float8, Float8Operand<Shape::n_tiles>, MmaOperand<1, Shape::n_tiles>>::Type;
  using Pipeline = ForwardPipeline<config>;
  using Position = typename Pipeline::Position;
  using Walk = ForwardWalk<config>;
  using Finisher = ScoreFinisher<config>;
  using Softmax = WgmmaSoftmax<float8, config.unbounded()>;
  // Products are 32 bytes deep.
  static constexpr int steps = WarpQueries<config>::steps;
  static constexpr int value_steps = config.block_n * config.itemsize() / 32;

  // log2 of the largest P: no overflow in float16, and room for P V in float32.
  static constexpr int reach = 15;

  const WgmmaForwardParams& params;
  Pipeline pipeline;
  int group;     // number of this warpgroup among the consumers
  int warp_row;  // first row of this warp in query tiles

  __device__ void run() const {
    const int first_row = group * Shape::warpgroup_rows;
    Walk walk(params, pipeline, {first_row, first_row + Shape::warpgroup_rows});
    bool more = walk.next_query_tile();
    if constexpr (config.meets_others()) suspects_of<config>(params.common, warp_row).clear();
    if (more && group == config.consumers() - 1) pass_turn();
    State state(params.exponent_factor);
    while (more) {
      pass_over(state, walk.leading());
      if constexpr (config.apart) {
        more = ApartForwardConsumer<config>{*this}.attend(state, walk);
        continue;
      }
      begin(state, walk);
      TileIndex tile;
      int unseen;
      while (true) {
        while (!walk.last()) {
          --walk.n;
          step(state, walk);
        }
        tile = walk.tile;
        unseen = walk.trailing();
        more = walk.next_query_tile();
        if (!config.joined || !more || unseen + walk.leading() > 0) break;
        if constexpr (config.joined) step_over(state, walk, tile);
      }
      end(state, tile);
      pass_over(state, unseen);
    }
    if constexpr (config.staged > 0) pipeline.stage(warp_row).finish();  // memory lives until here
  }

 private:
  friend ApartForwardConsumer<config>;

  struct State {
    WarpQueries<config> queries;
    Scores scores;
    Sums sums;
    typename Either<config.sums_by_tile, Sums, Nothing>::Type tile_sums;
    typename Either<config.shared_probabilities, Nothing, Probabilities>::Type p;
    Softmax softmax;
    typename Finisher::State finisher;
    float correction[2];
    bool behind = false;  // the sums, by `correction`, once the last probabilities are in
    Position key_at, value_at;

    __device__ explicit State(float factor) : softmax(factor) { sums.fill(0.0f); }
  };

  /// P of a query tile's first key tile.
  __device__ void begin(State& state, const Walk& walk) const {
    state.queries.take(pipeline, warp_row);
    take_factor(state, walk);
    const bool masked = is_masked(walk);
    await_turn();
    start_scores(state);
    pass_turn();
    await_products<0>();
    find_probabilities(state, walk, masked);
    round(state);
  }

  /// FP8 heads have scales of their own, ALiBi's have slopes.
  __device__ void take_factor(State& state, const Walk& walk) const {
    finisher().begin(state.finisher, walk);
    if constexpr (float8 && config.raw_scores) {
      constexpr float log2_e = 1.4426950408889634f, least = 7.888609052210118e-31f;  // 2**-100
      const Sequence& sequence = walk.tile.sequence;
      const float scale = descaled_scale<float>(params.common, sequence, walk.tile.head);
      state.softmax.factor = fmaxf(scale * log2_e, least);  // -inf times 0 would be NaN
    }
  }

  /// O += P V of a query tile's last key tile; it is written.
  __device__ void end(State& state, const TileIndex& finished) const {
    start_sums(state);
    await_products<0>();
    end_sums(state);
    catch_up(state, state.correction);
    finish(state, finished);
  }

  __device__ void finish(State& state, const TileIndex& tile) const {
    write(tile, state.softmax, state.sums);
    state.softmax.reset();
    state.sums.fill(0.0f);
  }

  /// Lets `count` key tiles go that no row of this group sees. Turns are taken and passed on as
  /// ever.
  __device__ void pass_over(State& state, int count) const {
    for (; count > 0; --count) {
      await_turn();
      pass_turn();
      pipeline.key_full(state.key_at).wait(state.key_at.round);
      pipeline.release(pipeline.key_empty(state.key_at));
      state.key_at.advance();
      finisher().pass_over(state.finisher);
      pipeline.value_full(state.value_at).wait(state.value_at.round);
      pipeline.release(pipeline.value_empty(state.value_at));
      state.value_at.advance();
    }
  }

  /// O += P V of the key tile before, and P of the walk's, of the same query tile.
  __device__ void step(State& state, const Walk& walk) const {
    const bool masked = is_masked(walk);
    start_both(state);
    if constexpr (config.eager) {
      step_eagerly(state, walk, masked);
    } else {
      const bool follows = find_probabilities(state, walk, masked);
      end_both(state);
      if (follows) rescale(state.sums, state.correction);
    }
    round(state);
  }

  /// The rest of a step where exponentials do not wait for the tile's maxima: P is relative to the
  /// shift so far, and the sums follow the next one with it, a step later.
  __device__ void step_eagerly(State& state, const Walk& walk, bool masked) const {
    settle(state.scores);
    finish_scores(state, walk, masked);
    const bool within_reach = state.softmax.template update_eagerly<reach>(state.scores);
    if (within_reach) release_key(state, walk);
    end_both(state);
    catch_up(state, state.correction);
    // Warps differ from here on, so no product may be waited for.
    if (within_reach) {
      state.behind = state.softmax.follow(state.correction);
    } else {
      find_scores_again(state, walk, masked);
      release_key(state, walk);
      state.softmax.update(state.scores, WgmmaMaxima(state.softmax.row_max), state.correction);
      rescale(state.sums, state.correction);
    }
  }

  /// The same from one query tile, which is written, to the next one.
  __device__ void step_over(State& state, const Walk& walk, const TileIndex& finished) const {
    state.queries.take(pipeline, warp_row);
    const Softmax softmax = state.softmax;
    const float correction[2] = {state.correction[0], state.correction[1]};
    state.softmax.reset();
    take_factor(state, walk);
    const bool masked = is_masked(walk);
    start_both(state);
    find_probabilities(state, walk, masked);
    end_both(state);
    catch_up(state, correction);
    write(finished, softmax, state.sums);
    state.sums.fill(0.0f);
    round(state);
  }

  /// Known before the products are waited for, not after.
  __device__ static bool is_masked(const Walk& walk) { return opaque(int(walk.masked())); }

  /// Starts both products and waits for the scores.
  __device__ void start_both(State& state) const {
    await_turn();
    start_scores(state);
    start_sums(state);
    pass_turn();
    await_products<1>();
  }

  /// If true, earlier sums are to be multiplied by `correction`.
  __device__ bool find_probabilities(State& state, const Walk& walk, bool masked) const {
    settle(state.scores);
    release_key(state, walk);
    finish_scores(state, walk, masked);
    const auto maxima = WgmmaMaxima::over(state.scores, state.softmax.row_max);
    return state.softmax.update(state.scores, maxima, state.correction);
  }

  /// Sums and probabilities are relative to the same shift again.
  __device__ void catch_up(State& state, const float (&correction)[2]) const {
    if (config.eager && state.behind) rescale(state.sums, correction);
    state.behind = false;
  }

  /// The scores of this warp's rows once more, by instructions that every warp has for itself:
  /// exponentials are out of reach in one tile of many, if at all.
  __device__ void find_scores_again(State& state, const Walk& walk, bool masked) const {
    state.scores.fill(0.0f);
    const auto keys = pipeline.key(state.key_at);
#pragma unroll(config.query_in_registers ? steps : 1)
    for (int step = 0; step < steps; ++step) {
      unsigned query[4];
      state.queries.read(pipeline, warp_row, query, step);
#pragma unroll
      for (int j = 0; j < Shape::n_tiles; j += 2) {
        unsigned key[4];
        keys.read(key, j * 8, step);
        mma_16x8x16<config.dtype>(state.scores.at[0][j], query, key[0], key[2]);
        mma_16x8x16<config.dtype>(state.scores.at[0][j + 1], query, key[1], key[3]);
      }
    }
    pipeline.hold_back(__float_as_uint(state.scores.at[0][0][0]));  // as in `WarpQueries::take`
    finish_scores(state, walk, masked);
  }

  __device__ Finisher finisher() const { return {params, pipeline, warp_row}; }
  __device__ void finish_scores(State& state, const Walk& walk, bool masked) const {
    finisher().finish(state.finisher, state.scores, walk, masked);
  }

  /// P becomes the left operand of P V. In shared memory each warp's part of a product reads the
  /// warp's own rows, as the hardware does it, so that warps need not wait for each other.
  __device__ void round(State& state) const {
    if constexpr (config.shared_probabilities) {
      if constexpr (config.staged > 0) pipeline.stage(warp_row).finish();  // out was there
      Probabilities p;
      p.template round<config.dtype>(state.scores);
      const auto rows = pipeline.probabilities().row_writer(warp_row);
#pragma unroll
      for (int step = 0; step < value_steps; ++step) rows.write(p.words(step), step);
      publish_shared();
      __syncwarp();
    } else {
      state.p.template round<config.dtype>(state.scores);
    }
  }

  __device__ void end_both(State& state) const {
    settle(state.scores);
    pipeline.hold_back(__float_as_uint(state.softmax.row_sum[0] + state.softmax.row_sum[1]));
    await_products<0>();
    end_sums(state);
    settle(state.scores);
  }

  __device__ void await_turn() const {
    if constexpr (config.turns) await_barrier<256>(1 + group);
  }
  __device__ void pass_turn() const {
    const int next = group + 1 < config.consumers() ? group + 1 : 0;
    if constexpr (config.turns) arrive_at_barrier<256>(1 + next);
  }

  __device__ void start_scores(State& state) const {
    const Position at = state.key_at;
    pipeline.key_full(at).wait(at.round);
    products_see_registers();
    const auto keys = pipeline.key(at);
    if constexpr (config.query_in_registers) {
      multiply_rows<config.dtype, steps>(state.scores, state.queries.at, keys);
    } else {
      multiply_rows<config.dtype, steps>(state.scores, pipeline.query(state.queries.place),
                                         group * Shape::warpgroup_rows, keys);
    }
    commit_products();
  }

  __device__ void release_key(State& state, const Walk& walk) const {
    pipeline.release(pipeline.key_empty(state.key_at));
    state.key_at.advance();
    if (!config.query_in_registers && walk.last()) state.queries.leave(pipeline);
  }

  __device__ void start_sums(State& state) const {
    pipeline.value_full(state.value_at).wait(state.value_at.round);
    products_see_registers();
    const auto values = pipeline.value(state.value_at);
    auto& sums = sums_of_tile(state);
    if constexpr (config.shared_probabilities) {
      const auto p = pipeline.probabilities();
      const int row = group * Shape::warpgroup_rows;
      if constexpr (float8) {
        multiply_rows<config.dtype, value_steps, config.sums_by_tile>(sums, p, row, values);
      } else {
        accumulate_rows<config.dtype, value_steps>(sums, p, row, values);
      }
    } else if constexpr (float8) {
      accumulate_rows<config.sums_by_tile, 0, value_steps>(sums, state.p, values);
    } else {
      accumulate_rows<config.dtype, 0, value_steps>(sums, state.p, values);
    }
    commit_products();
  }

  /// Where products with a key tile's values are added.
  __device__ static Sums& sums_of_tile(State& state) {
    if constexpr (config.sums_by_tile) {
      return state.tile_sums;
    } else {
      return state.sums;
    }
  }

  __device__ void end_sums(State& state) const {
    if constexpr (config.sums_by_tile) {
      settle(state.tile_sums);
      add(state.sums, state.tile_sums);
    } else {
      settle(state.sums);
    }
    pipeline.release(pipeline.value_empty(state.value_at));
    state.value_at.advance();
  }

  __device__ static void add(Sums& sums, const Sums& others) {
#pragma unroll
    for (int j = 0; j < Shape::n_tiles_v; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums.at[0][j][e] += others.at[0][j][e];
    }
  }

  __device__ static void rescale(Sums& sums, const float (&correction)[2]) {
#pragma unroll
    for (int j = 0; j < Shape::n_tiles_v; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums.at[0][j][e] *= correction[e >> 1];
    }
  }

  __device__ void write(const TileIndex& tile, const Softmax& softmax, const Sums& sums) const {
    write_forward_wgmma<config>(params, tile, warp_row, softmax, sums, pipeline.stage(warp_row));
  }
};

}  // namespace cupyflash
