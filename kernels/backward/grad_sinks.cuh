// The gradient of the sinks: a sink is a key whose value is 0.
#pragma once

#include "attention/params.cuh"
#include "tile/lanes.cuh"

namespace cupyflash {

/// grad_sink = -sum over rows of P(sink) * D; `term(batch, row, head)` is one row's product. One
/// block a head, always adding in the same order.
template <class T, class Term>
__device__ void sum_grad_sinks(const BackwardParams& params, bool varlen, const Term& term) {
  __shared__ T partial[32];
  const Attention& attention = params.attention;
  const int head = blockIdx.x;
  const int64 rows = (varlen ? 1 : int64(attention.batch)) * attention.seqlen_q;

  T total = T(0);
  for (int64 index = threadIdx.x; index < rows; index += blockDim.x) {
    total -= term(index / attention.seqlen_q, index % attention.seqlen_q, head);
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    total += __shfl_xor_sync(0xffffffffu, total, lanes);
  }
  if (LaneGrid::lane() == 0) partial[threadIdx.x / 32] = total;
  __syncthreads();
  if (threadIdx.x != 0) return;
  T sum = T(0);
  for (int warp = 0; warp < int(blockDim.x) / 32; ++warp) sum += partial[warp];
  params.grad_sinks[head * params.grad_sinks_stride] = float(sum);
}

}  // namespace cupyflash
