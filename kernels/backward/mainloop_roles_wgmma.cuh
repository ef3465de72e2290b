// The same for wide heads, where dK and dV of 64 keys fill the registers of two warpgroups: one
// makes dV, the other dK. P^T, which only the first has, is handed to the second in float32.
//
//   barrier      |                       | P^T is there  | dS is there |
//   tensor       | S^T = K Q^T           | dV += P^T dO  | dQ = dS K, left columns  |
//   values       |       P = exp S       | handed over   |                          | dQ added
//   tensor       | dP^T = V dO^T         | dK += dS^T Q  | dQ = dS K, right columns |
//   keys         |                       | dS, stored    |                          | dQ added
//   copies       | dO, Q of the next tile ------------------------------------------------>
//
// Shared memory has room for a panel of 64 columns of dQ for each role, which the copy engine adds
// to global memory; or dQ is added from registers (`direct`), for which its stores queue up.
#pragma once

#include "backward/consumer_wgmma.cuh"

namespace cupyflash {

/// One role arrives at a barrier and the other waits there, by turns, so that neither arrives twice
/// before the other has come: at `handed`, with P^T, after `shared` of the query tile before; at
/// `shared`, with dS, after `handed` of this one. Each buffer is written again after the barrier at
/// which the other role has arrived when it had read it: P^T after `shared`, dS after `handed`.
template <WgmmaBackwardConfig config>
struct BackwardRole : BackwardConsumer<config> {
  using Base = BackwardConsumer<config>;
  static constexpr int threads = 256;
  static constexpr int handed_barrier = 1;  // P^T is there for the key role
  static constexpr int shared_barrier = 2;  // dS is there for the value role
  static constexpr int own_barrier = 3;     // dS is there for the key role, which writes it
  static constexpr int panels = config.sum_dim() / 64;
  static_assert(config.early && config.block_m == 64 && config.block_n == 64);

  /// Adds the columns of dQ of role 0, which makes dV, or 1: those of panels `first` ...
  template <int role, int sum_tiles>
  __device__ void add(MmaFragment<1, sum_tiles>& sums, int first, const BackwardWalk<config>& walk,
                      unsigned count) const {
    if constexpr (config.direct) {
      this->add_sums(sums, this->warp_row, first, walk, count);
    } else {
      constexpr int own_panels = sum_tiles / 8;
#pragma unroll
      for (int panel = 0; panel < own_panels; ++panel) {
        this->pipeline.sums_empty(role).wait((count * own_panels + panel & 1) ^ 1);
        stage(sums, panel, role);
        this->release(this->pipeline.sums_full(role));
      }
    }
  }

 private:
  /// A panel of this warp's rows as it lies in global memory, 8 rows of it after 8 rows.
  template <int sum_tiles>
  __device__ void stage(MmaFragment<1, sum_tiles>& sums, int panel, int role) const {
    const unsigned target =
        this->pipeline.sums(role) + this->warp_row * 64 * 4 + 16 * MmaLane::lane();
    const auto put = [&](int distance, float4 four) { store_shared(target + 4 * distance, four); };
    this->template put_sums<64>(sums, put, 64 * panel);
  }
};

/// S^T, P^T, dV.
template <WgmmaBackwardConfig config>
struct BackwardValueRole : BackwardRole<config> {
  using Base = BackwardRole<config>;
  using Shape = typename Base::Shape;
  using Pipeline = typename Base::Pipeline;
  using Base::params, Base::pipeline;
  static constexpr int panels = Base::panels / 2;  // of dQ, the first ones

  __device__ void run() const {
    const BackwardParams& common = params.common;
    unsigned count = 0, keys = 0;
    int place = first_place<config>(params);
    for (; place >= 0; place = next_place<config>(params, place)) {
      typename Shape::ValueSums grad_value;
      grad_value.fill(0.0f);
      BackwardWalk<config> walk(params, place);
      if (walk.exists()) {
        this->await_key(keys);
        for (; walk.exists(); walk.advance(), ++count) step(grad_value, walk, count);
        ++keys;
      }
      this->write(key_tile_at<config>(params, place), common.grad_value, common.grad_value_strides,
                  common.attention.head_dim_v, grad_value, 1.0f);
    }
  }

 private:
  __device__ void step(typename Shape::ValueSums& grad_value, const BackwardWalk<config>& walk,
                       unsigned count) const {
    typename Base::Operand p;
    typename Base::Scores scores;
    float2 shifts[Base::n_tiles];  // read here, as later they would wait behind the products' reads
    this->await_query(count);
#pragma unroll
    for (int j = 0; j < Base::n_tiles; ++j) shifts[j] = this->shift_of(count, j);
    this->start_scores(scores, count);
    await_products<0>();
    settle(scores);
    this->hide(scores, walk);
#pragma unroll
    for (int j = 0; j < Base::n_tiles; ++j) this->exponentiate(scores, p, walk, j, shifts[j]);
    hand_over(scores);
    this->release_query(count);

    const auto grad_out_at = Pipeline::GradOutPosition::after(count);
    pipeline.grad_out_full(grad_out_at).wait(grad_out_at.round);
    this->start_sums(grad_value, p, pipeline.grad_out(grad_out_at));
    await_barrier<Base::threads>(Base::shared_barrier);
    await_products<0>();
    settle(grad_value);
    this->release(pipeline.grad_out_empty(grad_out_at));
    if constexpr (panels > 0) {
      MmaFragment<1, panels * 8> grad_query;
      this->start_query_sums(grad_query, pipeline.score(count), 0, 0);
      await_products<0>();
      settle(grad_query);
      this->release_last(pipeline.key_empty(), walk);
      this->template add<0>(grad_query, 0, walk, count);
    } else {
      this->release_last(pipeline.key_empty(), walk);
    }
  }

  __device__ void hand_over(const typename Base::Scores& p) const {
#pragma unroll
    for (int j = 0; j < Base::n_tiles; ++j) {
      const float (&four)[4] = p.at[0][j];
      store_shared(pipeline.handed() + j * 2048, make_float4(four[0], four[1], four[2], four[3]));
    }
    arrive_at_barrier<Base::threads>(Base::handed_barrier);
  }
};

/// dP^T, dS^T, dK.
template <WgmmaBackwardConfig config>
struct BackwardKeyRole : BackwardRole<config> {
  using Base = BackwardRole<config>;
  using Shape = typename Base::Shape;
  using Pipeline = typename Base::Pipeline;
  using Base::params, Base::pipeline;
  static constexpr int first_panel = Base::panels / 2;
  static constexpr int panels = Base::panels - first_panel;  // of dQ, the last ones

  __device__ void run() const {
    const BackwardParams& common = params.common;
    unsigned count = 0, keys = 0;
    int place = first_place<config>(params);
    for (; place >= 0; place = next_place<config>(params, place)) {
      typename Shape::KeySums grad_key;
      grad_key.fill(0.0f);
      BackwardWalk<config> walk(params, place);
      if (walk.exists()) {
        this->await_key(keys);
        this->await_value(keys);
        for (; walk.exists(); walk.advance(), ++count) step(grad_key, walk, count);
        ++keys;
      }
      this->write(key_tile_at<config>(params, place), common.grad_key, common.grad_key_strides,
                  common.attention.head_dim, grad_key, float(common.attention.softmax_scale));
    }
  }

 private:
  __device__ void step(typename Shape::KeySums& grad_key, const BackwardWalk<config>& walk,
                       unsigned count) const {
    const auto query_at = Pipeline::QueryPosition::after(count);
    typename Base::Scores slopes;
    float2 deltas[Base::n_tiles];
    this->await_query(count);
#pragma unroll
    for (int j = 0; j < Base::n_tiles; ++j) deltas[j] = this->delta_of(count, j);
    this->start_slopes(slopes, count);
    await_products<0>();
    settle(slopes);
    this->release_last(pipeline.value_empty(), walk);
    this->release(pipeline.grad_out_empty(Pipeline::GradOutPosition::after(count)));
    await_barrier<Base::threads>(Base::handed_barrier);
    typename Base::Operand ds;
#pragma unroll
    for (int j = 0; j < Base::n_tiles; ++j) {
      const float4 four = load_shared_quad(pipeline.handed() + j * 2048);
      const float p[4] = {four.x, four.y, four.z, four.w};
      Base::differentiate(ds, j, p, slopes.at[0][j], deltas[j]);
    }
    this->share(ds, count);
    publish_shared();
    arrive_at_barrier<Base::threads>(Base::shared_barrier);
    this->start_sums(grad_key, ds, pipeline.query(query_at));
    await_barrier<Base::threads / 2>(Base::own_barrier);

    MmaFragment<1, panels * 8> grad_query;
    this->start_query_sums(grad_query, pipeline.score(count), 0, first_panel);
    await_products<1>();
    settle(grad_key);
    this->release_query(count);
    await_products<0>();
    settle(grad_query);
    this->release_last(pipeline.key_empty(), walk);
    this->template add<1>(grad_query, first_panel, walk, count);
  }
};

}  // namespace cupyflash
