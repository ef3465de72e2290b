// Gradients of a key tile and its values, and the tile's share of all queries' gradients, on Hopper
// (FlashAttention-2, Algorithm 2): what a consumer warpgroup of 64 keys does. K and V stay in
// shared memory; query tiles of all heads of the group pass by. Scores are computed transposed,
// keys by queries, so that P^T and dS^T are operands of dV and dK as they are, in registers.
//
// barrier  |                                             | dS of all keys is there
// tensor   | S^T = K Q^T | dP^T = V dO^T |               | dV += P^T dO | dQ = dS K | dK += dS^T Q
// consumer |             | P = exp S     | P = exp S, dS |              |           | dQ stored
// reducer  | dQ of the tile before, to global memory ------------->
// copies   | Q of the next but one -------------------->              | dO of the next but one
//
// Exponentials take as long as two of the products: half of them run beside dP^T, the others beside
// dS, whose arithmetic leaves their unit free. Warpgroups do not take turns, but dQ, which sums
// over all keys, brings them together.
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
  static constexpr int beside_slopes = n_tiles / 2;  // pieces whose exponentials run beside dP^T
  static constexpr int known = 4;                    // of these, whose statistics are read before
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
    unsigned count = 0, keys = 0;
    int place = first_place<config>(params);
    for (; place >= 0; place = next_place<config>(params, place)) {
      State state(count);
      Walk walk(params, place);
      if (walk.exists()) {
        this->await_key(keys);
        this->await_value(keys);
        look_ahead(state, count);
        for (; walk.exists(); walk.advance()) step(state, walk);
        ++keys;
      }
      count = state.count;
      write(state, key_tile_at<config>(params, place));
    }
  }

 private:
  struct State {
    typename Shape::KeySums grad_key;
    typename Shape::ValueSums grad_value;
    Scores scores;  // transposed; then P^T, times softcap's derivative
    Scores slopes;  // dP^T
    Operand p;
    Operand ds;
    float2 shifts[beside_slopes];  // of the first pieces of a query tile
    unsigned count;                // query tiles that are done

    __device__ explicit State(unsigned count) : count(count) {
      grad_key.fill(0.0f);
      grad_value.fill(0.0f);
    }
  };

  /// A query tile.
  __device__ void step(State& state, const Walk& walk) const {
    find_slopes(state, walk);
    form_operands(state, walk);
    GradQuery grad_query;  // of this query tile alone
    start_gradients(state, grad_query);
    end_gradients(state, grad_query, walk);
    ++state.count;
  }

  __device__ void write(const State& state, const TileIndex& tile) const {
    const BackwardParams& common = params.common;
    Base::write(tile, common.grad_key, common.grad_key_strides, common.attention.head_dim,
                state.grad_key, float(common.attention.softmax_scale));
    Base::write(tile, common.grad_value, common.grad_value_strides, common.attention.head_dim_v,
                state.grad_value, 1.0f);
  }

  /// Scores, a part of their exponentials, and dP^T of a query tile.
  __device__ void find_slopes(State& state, const Walk& walk) const {
    this->start_scores(state.scores, state.count);
    this->start_slopes(state.slopes, state.count);
    read_shifts<known, beside_slopes>(state, state.count);
    await_products<1>();
    settle(state.scores);
    this->hide(state.scores, walk);
#pragma unroll
    for (int j = 0; j < beside_slopes; ++j) {
      this->exponentiate(state.scores, state.p, walk, j, state.shifts[j]);
    }
    this->hold_back(state.scores, beside_slopes);
    await_products<0>();
    settle(state.slopes);
    this->release_last(pipeline.value_empty(), walk);
  }

  /// The other exponentials, which keep their unit busy all the time, beside dS^T.
  __device__ void form_operands(State& state, const Walk& walk) const {
#pragma unroll
    for (int j = 0; j < n_tiles; ++j) {
      const int next = j + beside_slopes;
      if (next < n_tiles) {
        const float2 shift = this->shift_of(state.count, next);
        this->exponentiate(state.scores, state.p, walk, next, shift);
      }
      if constexpr (!early) Base::round(state.p, j, state.scores.at[0][j]);
      Base::differentiate(state.ds, j, state.scores.at[0][j], state.slopes.at[0][j],
                          this->delta_of(state.count, j));
    }
    this->share(state.ds, state.count);
  }

  /// From there, in this order, its part of dV, dQ and dK.
  __device__ void start_gradients(State& state, GradQuery& grad_query) const {
    const auto query_at = Pipeline::QueryPosition::after(state.count);
    const auto grad_out_at = Pipeline::GradOutPosition::after(state.count);
    this->start_sums(state.grad_value, state.p, pipeline.grad_out(grad_out_at));
    publish_shared();
    await_barrier<128 * config.consumers()>(shared_barrier);
    this->start_query_sums(grad_query, pipeline.score(state.count), row_part(), first_panel());
    await_products<1>();
    settle(state.grad_value);
    this->release(pipeline.grad_out_empty(grad_out_at));
    this->start_sums(state.grad_key, state.ds, pipeline.query(query_at));
  }

  /// Takes what `start_gradients` has started.
  __device__ void end_gradients(State& state, GradQuery& grad_query, const Walk& walk) const {
    if (!walk.last()) look_ahead(state, state.count + 1);
    if constexpr (!config.direct) pipeline.sums_empty().wait((state.count & 1) ^ 1);
    await_products<1>();
    settle(grad_query);
    this->release_last(pipeline.key_empty(), walk);
    if constexpr (config.direct) {
      this->add_sums(grad_query, sum_row(), first_panel(), walk, state.count);
    } else {
      hand_over(grad_query);
    }
    await_products<0>();
    settle(state.grad_key);
    this->release_query(state.count);
  }

  /// Of this warpgroup among those that share dQ.
  __device__ int row_part() const { return warp_row / 64 / col_parts; }
  __device__ int first_panel() const { return warp_row / 64 % col_parts * sum_panels; }
  /// First row of this warp in the query tile, of its part of dQ.
  __device__ int sum_row() const { return row_part() * 64 + warp_row % 64; }

  /// A query tile is there, and of its statistics those that come first: reads of shared memory
  /// take long when they have to wait behind the products'.
  __device__ void look_ahead(State& state, unsigned count) const {
    this->await_query(count);
    read_shifts<0, known>(state, count);
  }
  template <int first, int end>
  __device__ void read_shifts(State& state, unsigned count) const {
#pragma unroll
    for (int j = first; j < end; ++j) state.shifts[j] = this->shift_of(count, j);
  }

  /// Hands this warp's part of dQ to the reducer, in the order of the sums in global memory.
  __device__ void hand_over(GradQuery& grad_query) const {
    const int first = Base::sums_offset(sum_row(), first_panel());
    const unsigned target = pipeline.sums() + 4 * first;
    Base::put_sums(grad_query,
                   [&](int distance, float4 four) { store_shared(target + 4 * distance, four); });
    this->release(pipeline.sums_full());
  }
};

}  // namespace cupyflash
