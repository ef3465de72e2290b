// Before the Hopper backward's main kernel: statistics ready to use, and dq's sums set to zero
// (with whole heads, dq of queries that see nothing). And the gradient of the sinks.
#pragma once

#include "attention/config_wgmma.cuh"
#include "attention/key_range.cuh"
#include "attention/params_wgmma.cuh"
#include "backward/prepare_mma.cuh"

namespace cupyflash {

/// Sets the row of dq to 0 if its tile sees no key tile, which would write it.
template <WgmmaBackwardConfig config>
__device__ void clear_unseeing(const BackwardParams& params, const QueryRow& row) {
  if constexpr (!config.window) return;
  const Attention& attention = params.attention;
  const Sequence sequence = {int(row.batch), 0, 0, attention.seqlen_q, attention.seqlen_k};
  const int first = int(row.row) / config.block_m * config.block_m;
  const Range keys =
      visible_band<config.window>(attention, sequence).seen_by_any({first, first + config.block_m});
  if (keys.begin < keys.end) return;
  using Output = Element<config.dtype>;
  Output* target = static_cast<Output*>(params.grad_query) + row.offset(params.grad_query_strides);
  for (int c = row.lane; c < attention.head_dim; c += QueryRow::lanes) {
    target[c] = from_accumulator<Output>(0.0f);
  }
}

template <WgmmaBackwardConfig config>
__device__ void prepare_backward_wgmma(const WgmmaBackwardParams& params) {
  constexpr float log2e = 1.4426950408889634f;
  const BackwardParams& common = params.common;
  const Attention& attention = common.attention;
  const QueryRow row(params, false);
  float delta = row_delta<config>(common, row);
  if (!row.exists) return;

  const int64 pair = row.batch * attention.num_heads + row.head;
  if constexpr (config.deterministic) clear_turns(params, row, pair);
  if constexpr (config.whole_heads) {
    clear_unseeing<config>(common, row);
  } else {
    clear_sums<config.sum_dim()>(params, row, pair);
  }
  if (row.lane != 0) return;
  const float max = static_cast<const float*>(common.row_max)[row.offset(common.row_max_strides)];
  const float sum = static_cast<const float*>(common.row_sum)[row.offset(common.row_sum_strides)];
  if (common.grad_lse != nullptr) {
    delta -= static_cast<const float*>(common.grad_lse)[row.offset(common.grad_lse_strides)];
  }
  float* shifts = params.statistics + 2 * pair * params.rows;
  float* deltas = shifts + params.rows;
  // Rows that see nothing: whatever grad_out and grad_lse hold must not matter.
  const bool sees = sum != 0.0f;
  shifts[row.row] = sees ? fmaf(finite_shift(max), log2e, log2f(sum)) : infinity<float>;
  deltas[row.row] = sees ? delta : 0.0f;
  for (int64 past = attention.seqlen_q + row.row; past < params.rows; past += attention.seqlen_q) {
    shifts[past] = infinity<float>;
    deltas[past] = 0.0f;
  }
}

template <WgmmaBackwardConfig config>
__device__ void grad_sinks_wgmma(const WgmmaBackwardParams& params) {
  constexpr float log2e = 1.4426950408889634f;
  const Attention& attention = params.common.attention;
  sum_grad_sinks<float>(params.common, false, [&](int64 batch, int64 row, int head) {
    const float sink = params.common.sinks[head * attention.sinks_stride];
    const int64 pair = batch * attention.num_heads + head;
    const float exponent = sink * log2e - params.shifts_of(pair)[row];
    return exp2_hardware(exponent) * params.deltas_of(pair)[row];
  });
}

}  // namespace cupyflash
