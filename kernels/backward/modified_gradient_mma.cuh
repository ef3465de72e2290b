// The way back through the user's change of the scores: gradients of its arrays on the way from
// gradients by the new scores to those by the scores before.
#pragma once

#include "attention/config_mma.cuh"
#include "attention/score_mod.cuh"
#include "tile/fragment_mma.cuh"

namespace cupyflash {

/// Of a warp's part of one tile, transposed.
template <MmaBackwardConfig config>
struct ModifiedGradient {
  const ScoreFunction<float, config.score_mod>& function;
  float waiting;    // a factor that all gradients of scores still lack
  int first_query;  // of the lane
  int first_key;
  ScoreArrayGradients<float, config.score_mod, false> arrays;

  __device__ ModifiedGradient(const ScoreFunction<float, config.score_mod>& function,
                              void* const* sums, float waiting, int first_query, int first_key)
      : function(function),
        waiting(waiting),
        first_query(first_query + MmaLane::col()),
        first_key(first_key + MmaLane::row()),
        arrays(sums) {}

  /// Four elements of fragment (i, j), given the scores before.
  __device__ void apply(int i, int j, const float (&scores)[4], float (&gradients)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      // Where the key is hidden the derivative may be anything.
      if (gradients[e] == 0.0f) continue;
      const int query = first_query + j * 8 + e % 2;
      const int key = first_key + i * 16 + e / 2 * 8;
      arrays.add(function, gradients[e] * waiting, scores[e], query, key);
      gradients[e] *= function.factor(scores[e], query, key);
    }
  }
};

}  // namespace cupyflash
