// Before and after the tensor-core backward's main kernel: statistics ready to use, dq set to zero;
// then dq from float32 sums, and the gradient of the sinks.
#pragma once

#include "arch/convert.cuh"
#include "arch/exponential.cuh"
#include "attention/config_mma.cuh"
#include "attention/online_softmax.cuh"
#include "attention/params_mma.cuh"
#include "attention/query_sums.cuh"
#include "attention/score_mma.cuh"
#include "backward/grad_sinks.cuh"

namespace cupyflash {

/// A query row of (b, sq, h), varlen (total_q, h), for a quarter of a warp.
struct QueryRow {
  static constexpr int lanes = 8;
  int64 batch;
  int64 row;
  int head;
  int lane;
  bool exists;

  /// Neighbouring rows of one head: the statistics are contiguous that way.
  template <class Params>
  __device__ QueryRow(const Params& params, bool varlen) {
    const Attention& attention = params.common.attention;
    // The rows whose sums fit into memory can be counted in 32 bits, and their division is short.
    const unsigned index = blockIdx.x * (blockDim.x / lanes) + threadIdx.x / lanes;
    const unsigned pair = index / unsigned(attention.seqlen_q);
    lane = threadIdx.x % lanes;
    row = index - pair * attention.seqlen_q;
    head = pair % attention.num_heads;
    batch = pair / attention.num_heads;
    exists = batch < (varlen ? 1 : attention.batch);
  }

  __device__ int64 offset(const Strides& strides) const {
    return batch * strides.batch + row * strides.row + head * strides.head;
  }
};

/// What is left out of folded scores.
template <auto config>
__device__ float folded_cap(const Attention& attention) {
  return config.folded_cap() ? float(attention.softcap) : 0.0f;
}

/// Dropout's 1 - p, by which D is multiplied; 1 where it leaves nothing.
template <auto config>
__device__ float kept_share(const Attention& attention) {
  if (!config.dropout || attention.keep_factor == 0.0) return 1.0f;
  return float(1.0 / attention.keep_factor);
}

/// `scale`, times what gradients of scores wait for until they are written.
template <auto config>
__device__ float gradient_factor(const Attention& attention, float scale) {
  return scale * (config.folded_cap() ? folded_slope : 1.0f) / kept_share<config>(attention);
}

/// rowsum(grad_out * out), in all lanes of the row; to be called by whole warps.
template <auto config>
__device__ float row_delta(const BackwardParams& params, const QueryRow& row) {
  using Input = Element<config.dtype>;
  using Part = Vector<Input, config.load_width>;
  float delta = 0.0f;
  if (row.exists) {
    const auto* out = static_cast<const Input*>(params.out) + row.offset(params.out_strides);
    const auto* grad_out =
        static_cast<const Input*>(params.grad_out) + row.offset(params.grad_out_strides);
    // Eight columns a lane at a time, whatever the width of a load: the sum's bits stay the same.
#pragma unroll
    for (int base = 0; base < config.head_dim_v; base += QueryRow::lanes * 8) {
#pragma unroll
      for (int part = 0; part < 8; part += config.load_width) {
        const int c = base + row.lane * 8 + part;
        if (c >= params.attention.head_dim_v) break;
        const Part o = *reinterpret_cast<const Part*>(out + c);
        const Part g = *reinterpret_cast<const Part*>(grad_out + c);
#pragma unroll
        for (int e = 0; e < config.load_width; ++e) {
          // Rows that see nothing have out = 0; whatever their grad_out holds must not matter.
          const float value = to_accumulator(o[e]);
          if (value != 0.0f) delta = fmaf(value, to_accumulator(g[e]), delta);
        }
      }
    }
  }
#pragma unroll
  for (int lanes = QueryRow::lanes / 2; lanes > 0; lanes /= 2) {
    delta += __shfl_xor_sync(0xffffffffu, delta, lanes);
  }
  return delta;
}

/// Sets this row's share of the turns of its (batch, head) pair to 0.
__device__ inline void clear_turns(const MmaBackwardParams& params, const QueryRow& row,
                                   int64 pair) {
  for (int64 t = row.row * QueryRow::lanes + row.lane; t < params.tiles;
       t += int64(params.common.attention.seqlen_q) * QueryRow::lanes) {
    params.turns[pair * params.tiles + t] = 0;
  }
}

/// Sets the row's sums for dq to 0.
template <int dim>
__device__ void clear_sums(const MmaBackwardParams& params, const QueryRow& row, int64 pair) {
  using Sums = QuerySums<dim>;
  float* sums = Sums{params.query_sums}.row(pair * params.rows + row.row);
  for (int c = row.lane * 4; c < dim; c += QueryRow::lanes * 4) {
    *reinterpret_cast<float4*>(sums + c / Sums::columns * Sums::group + c % Sums::columns) =
        make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
}

template <MmaBackwardConfig config>
__device__ void prepare_backward_mma(const MmaBackwardParams& params) {
  constexpr float log2e = 1.4426950408889634f;
  const BackwardParams& common = params.common;
  const QueryRow row(params, config.varlen);
  float delta = row_delta<config>(common, row);
  if (!row.exists) return;

  const int64 pair = row.batch * common.attention.num_heads + row.head;
  if constexpr (config.deterministic) clear_turns(params, row, pair);
  if (row.lane == 0) {
    const float max = static_cast<const float*>(common.row_max)[row.offset(common.row_max_strides)];
    const float sum = static_cast<const float*>(common.row_sum)[row.offset(common.row_sum_strides)];
    if (common.grad_lse != nullptr) {
      delta -= static_cast<const float*>(common.grad_lse)[row.offset(common.grad_lse_strides)];
    }
    float* statistics = params.statistics + (pair * params.rows + row.row) * 3;
    const float shift = finite_shift(max) - folded_cap<config>(common.attention);
    statistics[0] = shift * (config.unbounded() ? 1.0f : log2e);
    statistics[1] = inverse_sum(sum);
    // Rows that see nothing: whatever grad_out and grad_lse hold must not matter.
    statistics[2] = sum == 0.0f ? 0.0f : delta;
  }
  clear_sums<config.head_dim>(params, row, pair);
}

template <MmaBackwardConfig config>
__device__ void grad_sinks_mma(const MmaBackwardParams& params) {
  constexpr float log2e = 1.4426950408889634f;
  const Attention& attention = params.common.attention;
  sum_grad_sinks<float>(params.common, config.varlen, [&](int64 batch, int64 row, int head) {
    const float sink =
        params.common.sinks[head * attention.sinks_stride] - folded_cap<config>(attention);
    const int64 scratch = (batch * attention.num_heads + head) * params.rows + row;
    const float* statistics = params.statistics + scratch * 3;
    const float exponent =
        config.unbounded() ? (sink - statistics[0]) * log2e : sink * log2e - statistics[0];
    return exp2_hardware(exponent) * statistics[1] * statistics[2];
  });
}

/// dq = softmax_scale * sums.
template <auto config>
__device__ void convert_query_gradient(const MmaBackwardParams& params) {
  using Output = Element<config.dtype>;
  using Part = Vector<Output, config.store_width>;
  constexpr int width = config.store_width < 2 ? 1 : 2;
  const BackwardParams& common = params.common;
  const Attention& attention = common.attention;
  const QueryRow row(params, config.varlen);
  if (!row.exists) return;

  const float scale = gradient_factor<config>(attention, float(attention.softmax_scale));
  const int64 scratch = (row.batch * attention.num_heads + row.head) * params.rows + row.row;
  using Sums = QuerySums<config.sum_dim()>;
  const float* sums = Sums{params.query_sums}.row(scratch);
  Output* target = static_cast<Output*>(common.grad_query) + row.offset(common.grad_query_strides);
#pragma unroll
  for (int base = 0; base < config.head_dim; base += QueryRow::lanes * config.store_width) {
    const int c = base + row.lane * config.store_width;
    if (c >= attention.head_dim) break;
    Part converted;
#pragma unroll
    for (int e = 0; e < config.store_width; e += width) {
      const auto sum = *reinterpret_cast<const Vector<float, width>*>(sums + Sums::offset(c + e));
#pragma unroll
      for (int i = 0; i < width; ++i) {
        converted[e + i] = from_accumulator<Output>(sum[i] * scale);
      }
    }
    *reinterpret_cast<Part*>(target + c) = converted;
  }
}

}  // namespace cupyflash
