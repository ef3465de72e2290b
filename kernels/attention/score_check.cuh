// Whether the user's `backward` is the derivative of the user's `forward`: both at random scores.
#pragma once

#include "attention/score_mod.cuh"

namespace cupyflash {

struct ScoreCheckParams {
  const void* score_params[8];
  const void* scores;  // (count,), accumulator type
  const int* indices;  // (count, 4): b, h, i, j
  void* results;       // (count, 3): forward(score - step), forward(score + step), backward(score)
  int64 param_sizes[8];
  double step;
  int64 count;
};

/// One thread a score.
template <class T>
__device__ void check_score(const ScoreCheckParams& params) {
  const int64 index = int64(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= params.count) return;
  const int* at = params.indices + index * 4;
  const ScoreFunction<T, true> function = {
      {{params.score_params, params.param_sizes}}, at[0], at[1]};
  const T score = static_cast<const T*>(params.scores)[index];
  const T step = T(params.step);
  T* results = static_cast<T*>(params.results) + index * 3;
  results[0] = function.value(score - step, at[2], at[3]);
  results[1] = function.value(score + step, at[2], at[3]);
  results[2] = function.factor(score, at[2], at[3]);
}

}  // namespace cupyflash
