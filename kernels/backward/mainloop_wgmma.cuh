// Gradients of a key tile and its values, and the tile's share of all queries' gradients, on Hopper
// (FlashAttention-2, Algorithm 2): what a consumer warpgroup of 64 keys does. K and V stay in
// shared memory; query tiles of all heads of the group pass by. Scores are computed transposed,
// keys by queries, so that P^T and dS^T are operands of dV and dK as they are, in registers.
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

#include "backward/consumer_wgmma.cuh"

namespace cupyflash {

template <WgmmaBackwardConfig config>
struct BackwardMainloop : BackwardConsumer<config> {
  using Base = BackwardConsumer<config>;
  using Shape = typename Base::Shape;
  using Scores = typename Base::Scores;
  using Operand = typename Base::Operand;
  using Pipeline = typename Base::Pipeline;
  using Walk = typename Base::Walk;
  using Base::params, Base::pipeline, Base::warp_row, Base::n_tiles;
  static constexpr bool early = config.early;
  static constexpr int shared_barrier = 1;
  static_assert(early || !config.softcap, "P^T is gone when it is rounded late");

  // A warpgroup has 64 queries of dQ and all columns or, where there are more warpgroups than that,
  // a part of them.
  static constexpr int row_parts = config.block_m / Shape::warpgroup_rows;
  static constexpr int col_parts = config.consumers() / row_parts;
  static constexpr int sum_panels = config.sum_dim() / 64 / col_parts;
  static_assert(row_parts * col_parts == config.consumers() &&
                sum_panels * 64 * col_parts == config.sum_dim());
  using GradQuery = MmaFragment<1, sum_panels * 8>;

  __device__ void run() const {
    pass_key_tiles([this](State& state, Walk& walk) {
      for (; walk.exists(); walk.advance()) {
        find_probabilities(state, walk);
        GradQuery grad_query;  // of this query tile alone
        start_gradients(state, grad_query);
        end_gradients(state, grad_query, walk);
        ++state.count;
      }
    });
  }

 protected:
  /// Calls pass(state, walk) for each key tile that any query sees, and writes all of them.
  template <class Pass>
  __device__ void pass_key_tiles(const Pass& pass) const {
    unsigned count = 0, keys = 0;
    int place = first_place<config>(params);
    for (; place >= 0; place = next_place<config>(params, place)) {
      State state(count);
      Walk walk(params, place);
      if (walk.exists()) {
        this->await_key(keys);
        this->await_value(keys);
        pass(state, walk);
        ++keys;
      }
      count = state.count;
      write(state, key_tile_at<config>(params, place));
    }
  }

  struct State {
    typename Shape::KeySums grad_key;
    typename Shape::ValueSums grad_value;
    Scores scores;  // transposed; then P^T, times softcap's derivative
    Scores slopes;  // dP^T
    Operand p;
    Operand ds;
    unsigned count;  // query tiles that are done

    __device__ explicit State(unsigned count) : count(count) {
      grad_key.fill(0.0f);
      grad_value.fill(0.0f);
    }
  };

  __device__ void write(const State& state, const TileIndex& tile) const {
    const BackwardParams& common = params.common;
    Base::write(tile, common.grad_key, common.grad_key_strides, common.attention.head_dim,
                state.grad_key, float(common.attention.softmax_scale));
    Base::write(tile, common.grad_value, common.grad_value_strides, common.attention.head_dim_v,
                state.grad_value, 1.0f);
  }

  /// P^T and dP^T of a query tile.
  __device__ void find_probabilities(State& state, const Walk& walk) const {
    this->start_scores(state.scores, state.count);
    this->start_slopes(state.slopes, state.count);
    await_products<1>();
    exponentiate(state, walk);
    await_products<0>();
    settle(state.slopes);
    settle(state.scores);
    this->release_last(pipeline.value_empty(), walk);
  }

  /// P^T of scores that are there, before what is waited for next.
  __device__ void exponentiate(State& state, const Walk& walk) const {
    settle(state.scores);
    Base::exponentiate(state.scores, state.p, walk, state.count);
    if constexpr (early) {
      this->hold_back(state.p);
    } else {
      this->hold_back(state.scores);
    }
  }

  /// From there, in this order, its part of dV, dQ and dK.
  __device__ void start_gradients(State& state, GradQuery& grad_query) const {
    const auto query_at = Pipeline::QueryPosition::after(state.count);
    const auto grad_out_at = Pipeline::GradOutPosition::after(state.count);
    if constexpr (!early) {
      state.p.template round<config.dtype>(state.scores);
      differentiate(state);
    }
    this->start_sums(state.grad_value, state.p, pipeline.grad_out(grad_out_at));
    if constexpr (early) differentiate(state);
    this->share(state.ds, state.count);
    await_barrier<128 * config.consumers()>(shared_barrier);
    await_products<0>();
    settle(state.grad_value);
    this->release(pipeline.grad_out_empty(grad_out_at));
    this->start_query_sums(grad_query, pipeline.score(state.count), row_part(), first_panel());
    this->start_sums(state.grad_key, state.ds, pipeline.query(query_at));
  }

  /// Takes what `start_gradients` has started.
  __device__ void end_gradients(State& state, GradQuery& grad_query, const Walk& walk) const {
    await_products<1>();
    settle(grad_query);
    this->release_last(pipeline.key_empty(), walk);
    if constexpr (config.direct) {
      this->add_sums(grad_query, sum_row(), first_panel(), walk, state.count);
    } else {
      stage(grad_query, state.count);
    }
    await_products<0>();
    settle(state.grad_key);
    this->release_query(state.count);
  }

  __device__ void differentiate(State& state) const {
#pragma unroll
    for (int j = 0; j < n_tiles; ++j) {
      Base::differentiate(state.ds, j, state.scores.at[0][j], state.slopes.at[0][j],
                          this->delta_of(state.count, j));
    }
  }

  /// Of this warpgroup among those that share dQ.
  __device__ int row_part() const { return warp_row / 64 / col_parts; }
  __device__ int first_panel() const { return warp_row / 64 % col_parts * sum_panels; }
  /// First row of this warp in the query tile, of its part of dQ.
  __device__ int sum_row() const { return row_part() * 64 + warp_row % 64; }

  /// Hands this warp's part of dQ to the reducer, in the order of the sums in global memory.
  __device__ void stage(GradQuery& grad_query, unsigned count) const {
    const int first = Base::sums_offset(sum_row(), first_panel());
    const unsigned target = pipeline.sums() + 4 * first;
    pipeline.sums_empty().wait((count & 1) ^ 1);
    Base::put_sums(grad_query,
                   [&](int distance, float4 four) { store_shared(target + 4 * distance, four); });
    publish_shared();
    this->release(pipeline.sums_full());
  }
};

}  // namespace cupyflash
