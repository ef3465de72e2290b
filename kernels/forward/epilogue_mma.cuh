// From a warp's unnormalised sums to out, row_max and row_sum in global memory.
#pragma once

#include "attention/online_softmax.cuh"
#include "forward/mainloop_mma.cuh"
#include "tile/store_swizzled.cuh"

namespace cupyflash {

template <MmaForwardConfig config>
__device__ void write_forward_mma(const ForwardParams& params, const TileIndex& tile,
                                  unsigned shared, MmaForwardState<config>& state) {
  using Shape = MmaForwardShape<config>;
  const Sequence& sequence = tile.sequence;
  const int warp_row = MmaForwardMainloop<config>::warp_row();
  float* row_max =
      statistic_row<float>(params.row_max, params.row_max_strides, sequence, tile.head);
  float* row_sum =
      statistic_row<float>(params.row_sum, params.row_sum_strides, sequence, tile.head);
  // In natural units: scores were scaled already, or are now.
  const float unit = state.softmax.factor * 0.6931471805599453f;
  const float sink = config.sinks ? params.sinks[tile.head * params.attention.sinks_stride] : 0.0f;

  float factor[Shape::m_tiles][2];
#pragma unroll
  for (int i = 0; i < Shape::m_tiles; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      OnlineSoftmax<float, 1> row;
      const float max = quad_maximum(state.softmax.row_max[i][r]);
      factor[i][r] = state.softmax.correction(state.softmax.shift[i][r],
                                              fmaxf(state.softmax.scaled(max), state.softmax.none));
      row.row_max[0] = config.raw_scores     ? max * unit
                       : config.folded_cap() ? fmaf(max, unit, float(params.attention.softcap))
                                             : max;
      row.row_sum[0] = quad_total(state.softmax.row_sum[i][r]) * factor[i][r];
      if constexpr (config.sinks) factor[i][r] *= row.add_sink(0, sink);
      factor[i][r] *= inverse_sum(row.row_sum[0]);
      if constexpr (config.dropout) factor[i][r] *= float(params.attention.keep_factor);

      const int query = tile.first_row + warp_row + i * 16 + r * 8 + MmaLane::row();
      if (query >= sequence.seqlen_q || MmaLane::col() != 0) continue;
      if (row_max != nullptr) row_max[query * params.row_max_strides.row] = row.row_max[0];
      if (row_sum != nullptr) row_sum[query * params.row_sum_strides.row] = row.row_sum[0];
    }
  }

  // The warp alone reads and writes these rows of the query tile.
  const typename Shape::OutTile staging = {shared};
  if constexpr (config.head_dim != config.head_dim_v) __syncthreads();
  stage_rows<config.dtype>(staging, warp_row, state.sums, factor);
  write_staged_rows<Shape::warp_rows, config.store_width>(
      head_rows<Element<config.dtype>>(params.out, params.out_strides, sequence.batch,
                                       sequence.first_query, tile.head,
                                       params.attention.head_dim_v),
      tile.first_row + warp_row, sequence.seqlen_q, staging, warp_row);
}

}  // namespace cupyflash
