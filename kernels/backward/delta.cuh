// D = rowsum(grad_out * out) - grad_lse, the part of the softmax's derivative that a whole row
// shares (FlashAttention-2, Algorithm 2).
#pragma once

#include "arch/convert.cuh"
#include "attention/config.cuh"
#include "attention/online_softmax.cuh"
#include "attention/params.cuh"
#include "backward/grad_sinks.cuh"

namespace cupyflash {

template <class T>
__device__ T* statistic_at(const void* pointer, const Strides& strides, int64 batch, int64 row,
                           int head) {
  const int64 offset = batch * strides.batch + row * strides.row + head * strides.head;
  return static_cast<T*>(const_cast<void*>(pointer)) + offset;
}

/// One warp a row of (b, sq, h); varlen: (total_q, h), one sequence as far as rows go.
template <BackwardConfig config>
__device__ void compute_delta(const BackwardParams& params) {
  using Input = const Element<config.dtype>;
  using T = Accumulator<config.dtype>;
  const Attention& attention = params.attention;
  const int64 sequences = config.varlen ? 1 : attention.batch;
  const int64 index = int64(blockIdx.x) * (blockDim.x / 32) + warp_index();
  if (index >= sequences * attention.seqlen_q * attention.num_heads) return;
  const int head = int(index % attention.num_heads);
  const int64 position = index / attention.num_heads;
  const int64 row = position % attention.seqlen_q;
  const int64 batch = position / attention.seqlen_q;

  const Input* out = static_cast<Input*>(params.out) + batch * params.out_strides.batch +
                     row * params.out_strides.row + head * params.out_strides.head;
  const Input* grad_out = static_cast<Input*>(params.grad_out) +
                          batch * params.grad_out_strides.batch +
                          row * params.grad_out_strides.row + head * params.grad_out_strides.head;
  T delta = T(0);
  for (int c = LaneGrid::lane(); c < attention.head_dim_v; c += 32) {
    // Rows that see nothing have out = 0; whatever their grad_out holds must not matter.
    const T value = to_accumulator(out[c]);
    if (value != T(0)) delta = multiply_add(to_accumulator(grad_out[c]), value, delta);
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    delta += __shfl_xor_sync(0xffffffffu, delta, lanes);
  }
  if (LaneGrid::lane() != 0) return;
  if (params.grad_lse != nullptr) {
    delta -= *statistic_at<T>(params.grad_lse, params.grad_lse_strides, batch, row, head);
  }
  const T sum = *statistic_at<T>(params.row_sum, params.row_sum_strides, batch, row, head);
  *statistic_at<T>(params.delta, params.delta_strides, batch, row, head) =
      sum == T(0) ? T(0) : delta;
}

template <BackwardConfig config>
__device__ void compute_grad_sinks(const BackwardParams& params) {
  using T = Accumulator<config.dtype>;
  sum_grad_sinks<T>(params, config.varlen, [&](int64 batch, int64 row, int head) {
    const T sink = T(params.sinks[head * params.attention.sinks_stride]);
    const T sum = *statistic_at<T>(params.row_sum, params.row_sum_strides, batch, row, head);
    const T max = *statistic_at<T>(params.row_max, params.row_max_strides, batch, row, head);
    const T delta = *statistic_at<T>(params.delta, params.delta_strides, batch, row, head);
    return exp_difference(sink, finite_shift(max)) * inverse_sum(sum) * delta;
  });
}

}  // namespace cupyflash
