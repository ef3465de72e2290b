// The thread that asks the copy engine for tiles, as far ahead of the consumers as there is memory.
#pragma once

#include "forward/pipeline_wgmma.cuh"
#include "forward/walk_wgmma.cuh"

namespace cupyflash {

template <WgmmaForwardConfig config>
struct ForwardProducer {
  using Pipeline = ForwardPipeline<config>;
  using Position = typename Pipeline::Position;
  const WgmmaForwardParams& params;
  Pipeline pipeline;

  /// In the order of use: K(0), Q, K(1), V(0), K(2), V(1), ... Q of a next query tile comes after
  /// the last V of the one before, as its memory may become free only then. The bias comes with its
  /// key tile, or, where there is memory for one tile of it, when the one before may have been
  /// read.
  __device__ void run() const {
    prefetch_map(params.query_map);
    prefetch_map(params.key_map);
    prefetch_map(params.value_map);
    if constexpr (config.bias) prefetch_map(params.bias_map);
    ForwardWalk<config> walk(params, pipeline, {0, config.block_m}, true);
    if (!walk.next_query_tile()) return;
    Position key_at, value_at;
    typename Pipeline::QueryPosition query_at;
    typename Pipeline::BiasPosition bias_at;
    Keys before = load_key(walk, key_at);
    load_query(walk, query_at);
    load_bias(walk, bias_at);
    while (walk.advance()) {
      const Keys keys = load_key(walk, key_at);
      if constexpr (config.bias_stages > 1) load_bias(walk, bias_at);
      load_value(before, value_at);
      if (walk.first()) load_query(walk, query_at);
      if constexpr (config.bias_stages == 1) load_bias(walk, bias_at);
      before = keys;
    }
    load_value(before, value_at);
  }

 private:
  /// In maps, of which varlen's have none.
  __device__ static int batch_of(const ForwardWalk<config>& walk) {
    return config.varlen ? 0 : walk.tile.sequence.batch;
  }

  struct Keys {
    int row, head, batch;
  };

  __device__ Keys load_key(const ForwardWalk<config>& walk, Position& at) const {
    const Keys keys = {walk.tile.sequence.first_key + walk.first_key() - params.first_key,
                       walk.tile.head / params.common.attention.group_size, batch_of(walk)};
    pipeline.key_empty(at).wait(at.round ^ 1);
    pipeline.key(at).load(params.key_map, keys.row, keys.head, keys.batch, pipeline.key_full(at));
    at.advance();
    return keys;
  }

  __device__ void load_value(const Keys& keys, Position& at) const {
    pipeline.landed_empty(at).wait(at.round ^ 1);
    pipeline.landed(at).load(params.value_map, keys.row, keys.head, keys.batch,
                             pipeline.landed_full(at));
    at.advance();
  }

  __device__ void load_query(const ForwardWalk<config>& walk,
                             typename Pipeline::QueryPosition& at) const {
    pipeline.query_empty(at).wait(at.round ^ 1);
    pipeline.query(at).load(params.query_map, walk.tile.sequence.first_query + walk.tile.first_row,
                            walk.tile.head, batch_of(walk), pipeline.query_full(at));
    at.advance();
  }

  /// Where the bias is broadcast over heads or sequences, its array has one.
  __device__ void load_bias(const ForwardWalk<config>& walk,
                            typename Pipeline::BiasPosition& at) const {
    if constexpr (config.bias) {
      const ScoreStrides& strides = params.common.scores.bias;
      const int head = strides.head == 0 ? 0 : walk.tile.head;
      const int batch = strides.batch == 0 ? 0 : walk.tile.sequence.batch;
      pipeline.bias_empty(at).wait(at.round ^ 1);
      pipeline.bias(at).load(params.bias_map, walk.first_key(), walk.tile.first_row, head, batch,
                             pipeline.bias_full(at));
      at.advance();
    }
  }
};

}  // namespace cupyflash
