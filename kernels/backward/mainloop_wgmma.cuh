// Gradients of a key tile and its values, and the tile's share of all queries' gradients, on Hopper
// (FlashAttention-2, Algorithm 2): what a consumer warpgroup does. K and V stay in shared memory;
// query tiles of all heads of the group pass by. Scores are computed transposed, keys by queries,
// so that P^T and dS^T are operands of dV and dK as they are, in registers.
//
//   barrier    |                               | dS of all keys is there   |
//   tensor     | S^T = K Q^T, dP^T = V dO^T    | dV += P^T dO | dQ = dS K  | dK += dS^T Q      |
//   consumers  |      P = exp S beside dP^T    | dS, stored   |            | dQ stored         |
//   reducer    | dQ of the tile before, to global memory ---> |            |
//   copies     | dO of the next tile ------------------------------------> | Q of the next -->  |
//
// Warpgroups do not take turns: while one computes exponentials or dS, another's products run. Only
// dQ, which sums over all keys, brings them together.
#pragma once

#include "arch/bulk.cuh"
#include "arch/named_barrier.cuh"
#include "attention/mask_mma.cuh"
#include "attention/query_sums.cuh"
#include "attention/score_mma.cuh"
#include "backward/pipeline_wgmma.cuh"
#include "backward/walk_wgmma.cuh"
#include "tile/multiply_wgmma.cuh"
#include "tile/store_quads.cuh"

namespace cupyflash {

template <WgmmaBackwardConfig config>
struct BackwardConsumer {
  using Shape = WgmmaBackwardShape<config>;
  using Scores = typename Shape::Scores;
  using QuerySums = typename Shape::QuerySums;
  using Operand = MmaOperand<1, Shape::n_tiles>;
  using Pipeline = BackwardPipeline<config>;
  using Walk = BackwardWalk<config>;
  static constexpr int n_tiles = Shape::n_tiles;
  static constexpr bool early = config.early;
  static_assert(early || !config.softcap, "P^T is gone when it is rounded late");

  const WgmmaBackwardParams& params;
  Pipeline pipeline;
  int group;     // number of this warpgroup among the consumers
  int warp_row;  // first row of this warp in the key tile

  __device__ void run() const {
    State state;
    Walk walk(params);
    if (walk.exists()) {
      pipeline.key_full().wait(0);
      pipeline.value_full().wait(0);
      for (; walk.exists(); walk.advance()) {
        find_probabilities(state, walk);
        QuerySums grad_query;  // of this query tile alone
        start_gradients(state, grad_query);
        end_gradients(state, grad_query);
      }
    }
    const BackwardParams& common = params.common;
    // Found again, instead of being kept.
    const TileIndex tile = locate_key_tile<config>(common, opaque(blockIdx.x));
    write(tile, common.grad_key, common.grad_key_strides, common.attention.head_dim, state.grad_key,
          float(common.attention.softmax_scale));
    write(tile, common.grad_value, common.grad_value_strides, common.attention.head_dim_v,
          state.grad_value, 1.0f);
  }

 private:
  struct State {
    typename Shape::KeySums grad_key;
    typename Shape::ValueSums grad_value;
    Scores scores;  // transposed; then P^T, times softcap's derivative
    Scores slopes;  // dP^T
    Operand p;
    Operand ds;
    unsigned count = 0;  // query tiles that are done

    __device__ State() {
      grad_key.fill(0.0f);
      grad_value.fill(0.0f);
    }
  };

  /// P^T and dP^T of a query tile.
  __device__ void find_probabilities(State& state, const Walk& walk) const {
    start_scores(state);
    start_slopes(state);
    await_products<1>();
    settle(state.scores);
    exponentiate(state, walk);
    if constexpr (early) hold_back(state.p);
    await_products<0>();
    settle(state.slopes);
    settle(state.scores);
  }

  /// From there, in this order, its part of dV, dQ and dK.
  __device__ void start_gradients(State& state, QuerySums& grad_query) const {
    if constexpr (!early) {
      state.p.template round<config.dtype>(state.scores);
      differentiate(state);
    }
    start_sums(state.grad_value, state.p, pipeline.grad_out(grad_out_at(state)));
    if constexpr (early) differentiate(state);
    const auto scores = pipeline.score(state.count);
#pragma unroll
    for (int step = 0; step < n_tiles / 2; ++step) {
      scores.write(state.ds.at[step][0], warp_row, step);
    }
    publish_shared();
    await_barrier<128 * config.consumers()>(1);
    await_products<0>();
    settle(state.grad_value);
    release(pipeline.grad_out_empty(grad_out_at(state)));
    start_query_sums(grad_query, scores);
    start_sums(state.grad_key, state.ds, pipeline.query(query_at(state)));
  }

  /// Takes what `start_gradients` has started.
  __device__ void end_gradients(State& state, QuerySums& grad_query) const {
    await_products<1>();
    settle(grad_query);
    stage(grad_query, state.count);
    await_products<0>();
    settle(state.grad_key);
    release(pipeline.query_empty(query_at(state)));
    ++state.count;
  }

  /// This warp has read what the barrier stands for.
  __device__ static void release(AsyncBarrier empty) {
    __syncwarp();
    if (MmaLane::lane() == 0) empty.arrive();
  }

  /// The assembler would move the wait that follows to before the arithmetic that is to run beside
  /// the products; not so if a store, which nobody reads, needs its result first.
  __device__ void hold_back(const Operand& result) const {
    unsigned all = 0;
#pragma unroll
    for (int step = 0; step < n_tiles / 2; ++step) {
#pragma unroll
      for (int e = 0; e < 4; ++e) all |= result.at[step][0][e];
    }
    store_shared(pipeline.scratch(), all);
  }

  __device__ static auto query_at(const State& state) {
    return Pipeline::QueryPosition::after(state.count);
  }
  __device__ static auto grad_out_at(const State& state) {
    return Pipeline::GradOutPosition::after(state.count);
  }

  /// S^T = K Q^T.
  __device__ void start_scores(State& state) const {
    const auto at = query_at(state);
    pipeline.query_full(at).wait(at.round);
    products_see_registers();
    multiply_rows<config.dtype, config.head_dim / 16>(
        state.scores, pipeline.key(), group * Shape::warpgroup_rows, pipeline.query(at));
    commit_products();
  }

  /// dP^T = V dO^T.
  __device__ void start_slopes(State& state) const {
    const auto at = grad_out_at(state);
    pipeline.grad_out_full(at).wait(at.round);
    products_see_registers();
    multiply_rows<config.dtype, config.head_dim_v / 16>(
        state.slopes, pipeline.value(), group * Shape::warpgroup_rows, pipeline.grad_out(at));
    commit_products();
  }

  /// dV += P^T dO, or dK += dS^T Q.
  template <class Sums, class Tile>
  __device__ static void start_sums(Sums& sums, const Operand& left, const Tile& right) {
    products_see_registers();
    accumulate_rows<config.dtype, 0, n_tiles / 2>(sums, left, right);
    commit_products();
  }

  /// This warpgroup's part of dQ = dS K.
  template <class Sums, class Tile>
  __device__ void start_query_sums(Sums& sums, const Tile& scores) const {
    products_see_registers();
    multiply_columns<config.dtype>(sums, scores, group / Shape::col_parts, pipeline.key(),
                                   group % Shape::col_parts * (Shape::sum_cols / 64));
    commit_products();
  }

  /// From products to P^T = exp(S - L): rounded as an operand, and in place of the scores what dS
  /// is to be multiplied by.
  __device__ void exponentiate(State& state, const Walk& walk) const {
    Scores& scores = state.scores;
    const TileIndex& tile = walk.tile;
    const int first_query = walk.first_query();
    const Band transposed = walk.band.transposed();
    const Range keys = {tile.first_row, tile.first_row + config.block_n};
    if (!transposed.seen_by_existing(keys).covers({first_query, first_query + config.block_m})) {
      apply_mask(scores, transposed, tile.first_row + warp_row, first_query);
    }
    const Score<config> score(params.common, tile.sequence, walk.head);
    const MmaScore<config> score_of(params.common, score);
    const unsigned shifts = pipeline.shifts(query_at(state)) + 4 * MmaLane::col();
#pragma unroll
    for (int j = 0; j < n_tiles; ++j) {
      const float2 shift = load_shared_pair(shifts + j * 32);
      float (&s)[4] = scores.at[0][j];
      float probability[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        ScoreAndSlope value = {s[e], 1.0f};
        if constexpr (!config.raw_scores) {
          value = score_of.of(s[e], 0.0f, 0.0f);
          if (s[e] == -infinity<float>) value.value = -infinity<float>;
        }
        probability[e] = exp2_hardware(
            fmaf(value.value, params.exponent_factor, -(e % 2 == 0 ? shift.x : shift.y)));
        s[e] = config.softcap ? probability[e] * value.slope : probability[e];
      }
      if constexpr (early) {
        state.p.upper(0, j) = pack_pair<config.dtype>(probability[0], probability[1]);
        state.p.lower(0, j) = pack_pair<config.dtype>(probability[2], probability[3]);
      }
    }
  }

  /// dS^T = P^T (dP^T - D), rounded.
  __device__ void differentiate(State& state) const {
    const unsigned deltas = pipeline.deltas(query_at(state)) + 4 * MmaLane::col();
#pragma unroll
    for (int j = 0; j < n_tiles; ++j) {
      const float2 delta = load_shared_pair(deltas + j * 32);
      const float (&p)[4] = state.scores.at[0][j];
      const float (&slope)[4] = state.slopes.at[0][j];
      state.ds.upper(0, j) =
          pack_pair<config.dtype>(p[0] * (slope[0] - delta.x), p[1] * (slope[1] - delta.y));
      state.ds.lower(0, j) =
          pack_pair<config.dtype>(p[2] * (slope[2] - delta.x), p[3] * (slope[3] - delta.y));
    }
  }

  /// Hands this warp's part of dQ to the reducer, in the order of the sums in global memory.
  __device__ void stage(const QuerySums& grad_query, unsigned count) const {
    using Order = cupyflash::QuerySums<config.sum_dim()>;
    constexpr int pairs = Shape::sum_cols / 16;
    const int row = group / Shape::col_parts * Shape::warpgroup_rows + warp_row % 64;
    const int col = group % Shape::col_parts * Shape::sum_cols;
    const unsigned target =
        pipeline.sums() + 4 * (row * config.sum_dim() + Order::offset(col)) + 16 * MmaLane::lane();
    pipeline.sums_empty().wait((count & 1) ^ 1);
#pragma unroll
    for (int pair = 0; pair < pairs; ++pair) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float (&left)[4] = grad_query.at[0][2 * pair];
        const float (&right)[4] = grad_query.at[0][2 * pair + 1];
        store_shared(target + 4 * (r * 8 * config.sum_dim() + pair * Order::group),
                     make_float4(left[2 * r], left[2 * r + 1], right[2 * r], right[2 * r + 1]));
      }
    }
    publish_shared();
    release(pipeline.sums_full());
  }

  /// Writes this warp's keys of dK or dV.
  template <int cols>
  __device__ void write(const TileIndex& tile, void* target, const Strides& strides, int dim,
                        const MmaFragment<1, cols>& sums, float scale) const {
    const float factor[2] = {scale, scale};
    const Sequence& sequence = tile.sequence;
    write_rows<config.dtype, config.store_width>(
        head_rows<Element<config.dtype>>(target, strides, sequence.batch, sequence.first_key,
                                         tile.head, dim),
        tile.first_row + warp_row, sequence.seqlen_k, sums, factor);
  }
};

}  // namespace cupyflash
