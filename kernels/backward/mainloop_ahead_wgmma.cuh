// The same with scores a query tile ahead: those of the next tile are asked for before this one's
// gradients, and exponentials run beside these. Warpgroups that share dQ reach their exponentials
// at the same time, so that nothing else would keep the tensor cores busy meanwhile.
//
//   barrier    |                                                  | dS of all keys is there
//   tensor     | dQ, dK of the tile before         | dP^T         | dV += P^T dO, S^T of the next
//   consumers  |    P = exp S     | dQ stored      |              | dS, stored
//
// dK takes dS^T from shared memory, where it lies for dQ: a warpgroup that issues products with an
// operand in registers cannot go on until most of them are done.
#pragma once

#include "backward/mainloop_wgmma.cuh"

namespace cupyflash {

template <WgmmaBackwardConfig config>
struct BackwardAhead : BackwardMainloop<config> {
  using Base = BackwardMainloop<config>;
  using Base::pipeline, Base::early, Base::shared_barrier;
  using typename Base::GradQuery, typename Base::Pipeline, typename Base::State,
      typename Base::Walk;
  static_assert(!config.direct, "a tile's dQ comes when the walk has gone on");

  __device__ void run() const {
    this->pass_key_tiles([this](State& state, Walk& walk) {
      begin(state, walk);
      while (!walk.last()) {
        walk.advance();
        step(state, walk);
      }
      end(state);
    });
  }

 private:
  /// P^T and dS^T of the first query tile.
  __device__ void begin(State& state, const Walk& walk) const {
    this->start_scores(state.scores, state.count);
    await_products<0>();
    this->exponentiate(state, walk);
    find_slopes(state, walk);
    form_operands(state);
  }

  /// The gradients of the query tile before the walk's, and P^T and dS^T of that. No products are
  /// under way where steps meet: the assembler would let all wait for each other.
  __device__ void step(State& state, const Walk& walk) const {
    const unsigned before = state.count++;
    GradQuery grad_query;
    start_values(state, before);
    this->start_scores(state.scores, state.count);
    start_queries_and_keys(state, grad_query, before);

    await_products<2>();
    settle(state.grad_value);
    this->release(pipeline.grad_out_empty(Pipeline::GradOutPosition::after(before)));
    this->exponentiate(state, walk);
    await_products<1>();
    settle(grad_query);
    this->stage(grad_query, before);
    find_slopes(state, walk);
    settle(state.grad_key);
    this->release_query(before);
    form_operands(state);
  }

  /// The gradients of the last query tile.
  __device__ void end(State& state) const {
    const unsigned before = state.count++;
    GradQuery grad_query;
    start_values(state, before);
    start_queries_and_keys(state, grad_query, before);
    await_products<0>();
    settle(state.grad_value);
    settle(state.grad_key);
    settle(grad_query);
    this->release(pipeline.grad_out_empty(Pipeline::GradOutPosition::after(before)));
    if constexpr (config.persistent) this->release(pipeline.key_empty());
    this->release_query(before);
    this->stage(grad_query, before);
  }

  /// dP^T, when all that was asked for before is there.
  __device__ void find_slopes(State& state, const Walk& walk) const {
    this->start_slopes(state.slopes, state.count);
    await_products<0>();
    settle(state.slopes);
    this->release_last(pipeline.value_empty(), walk);
  }

  /// P^T in registers, and dS^T in shared memory, of all consumers.
  __device__ void form_operands(State& state) const {
    if constexpr (!early) state.p.template round<config.dtype>(state.scores);
    this->differentiate(state);
    this->share(state.ds, state.count);
    await_barrier<128 * config.consumers()>(shared_barrier);
  }

  __device__ void start_values(State& state, unsigned count) const {
    this->start_sums(state.grad_value, state.p,
                     pipeline.grad_out(Pipeline::GradOutPosition::after(count)));
  }

  __device__ void start_queries_and_keys(State& state, GradQuery& grad_query,
                                         unsigned count) const {
    const auto scores = pipeline.score(count);
    this->start_query_sums(grad_query, scores, this->row_part(), this->first_panel());
    products_see_registers();
    accumulate_rows<config.dtype, config.block_m / 16>(
        state.grad_key, scores, this->first_key_row(),
        pipeline.query(Pipeline::QueryPosition::after(count)));
    commit_products();
  }
};

}  // namespace cupyflash
