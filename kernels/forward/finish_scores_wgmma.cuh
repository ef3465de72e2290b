// From a warp's products to its scores on Hopper: what is left to do of scale, softcap, bias and
// ALiBi, and the mask.
#pragma once

#include "arch/pack.cuh"
#include "attention/mask_mma.cuh"
#include "attention/score_mma.cuh"
#include "forward/pipeline_wgmma.cuh"
#include "forward/walk_wgmma.cuh"

namespace cupyflash {

template <WgmmaForwardConfig config>
struct ScoreFinisher {
  using Shape = WgmmaForwardShape<config>;
  using Scores = typename Shape::Scores;
  using Pipeline = ForwardPipeline<config>;
  using Walk = ForwardWalk<config>;
  using BiasReader = typename Shape::BiasTile::RowReader;

  /// What is kept from key tile to key tile.
  struct State {
    typename Either<config.alibi, float, Nothing>::Type slope;  // of the query tile's head
    typename Pipeline::BiasPosition bias_at;
  };

  const WgmmaForwardParams& params;
  Pipeline pipeline;
  int warp_row;  // first row of this warp in query tiles

  /// For the query tile that the walk has come to: its slope comes from memory.
  __device__ void begin(State& state, const Walk& walk) const {
    if constexpr (config.alibi) state.slope = score_of(walk).alibi_slope;
  }

  __device__ void finish(State& state, Scores& scores, const Walk& walk, bool masked) const {
    if constexpr (config.alibi || !config.raw_scores) change(state, scores, walk);
    const int first_query = walk.tile.first_row + warp_row;
    if (masked) {
      const Band band = walk.own_band();
      const int first_key = walk.first_key() - walk.n * config.block_n;
      if (walk.left_edge()) {
        apply_mask(scores, band, first_query, first_key);
      } else {
        apply_mask<false>(scores, band, first_query, first_key);
      }
    }
  }

  /// Lets the bias of a key tile go that no row of this warp sees.
  __device__ void pass_over(State& state) const {
    if constexpr (config.bias) {
      pipeline.bias_full(state.bias_at).wait(state.bias_at.round);
      release(state);
    }
  }

 private:
  __device__ MmaScore<config> score_of(const Walk& walk) const {
    return MmaScore<config>(Score<config>(params.common, walk.tile.sequence, walk.tile.head));
  }

  __device__ void change(State& state, Scores& scores, const Walk& walk) const {
    MmaScore<config> score = score_of(walk);
    if constexpr (config.alibi) score.alibi_slope = state.slope;
    const int query = walk.tile.first_row + warp_row + MmaLane::row();
    const float distance = float(query + score.diagonal - walk.first_key() - MmaLane::col());
    BiasReader reader;
    if constexpr (config.bias) {
      pipeline.bias_full(state.bias_at).wait(state.bias_at.round);
      reader = pipeline.bias(state.bias_at).row_reader(warp_row);
    }
    unsigned read = 0;
#pragma unroll
    for (int s = 0; s < Shape::n_tiles / 2; ++s) {
      float bias[2][4] = {};
      if constexpr (config.bias) read |= read_bias(reader, bias, s);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        float& value = scores.at[0][2 * s + e / 4][e % 4];
        const int away = e % 4 / 2 * 8 - s * 16 - e / 4 * 8 - e % 2;
        value = score.of(value, bias[e / 4][e % 4], distance + float(away)).value;
      }
    }
    if constexpr (config.bias) {
      pipeline.hold_back(read);  // as in `WarpQueries::take`
      release(state);
    }
  }

  /// The bias of pieces 2 s and 2 s + 1 of the warp's scores. The result needs that reading ends.
  __device__ static unsigned read_bias(const BiasReader& reader, float (&bias)[2][4], int s) {
    unsigned pairs[4];
    reader.read(pairs, s);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float2 two = unpack_pair<config.bias_dtype>(pairs[e]);
      bias[e / 2][e % 2 * 2] = two.x;
      bias[e / 2][e % 2 * 2 + 1] = two.y;
    }
    return pairs[0];
  }

  __device__ void release(State& state) const {
    pipeline.release(pipeline.bias_empty(state.bias_at));
    state.bias_at.advance();
  }
};

}  // namespace cupyflash
