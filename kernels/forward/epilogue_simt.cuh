// From the unnormalised sums of a tile to out, row_max and row_sum in global memory.
#pragma once

#include "forward/mainloop_simt.cuh"
#include "tile/store.cuh"

namespace cupyflash {

template <ForwardConfig config>
__device__ void write_forward(const ForwardParams& params, const TileIndex& tile,
                              ForwardState<config>& state) {
  using Shape = ForwardShape<config>;
  using T = typename Shape::T;
  const Sequence& sequence = tile.sequence;
  const auto out = head_rows<Element<config.out_dtype>>(params.out, params.out_strides,
                                                        sequence.batch, sequence.first_query,
                                                        tile.head, params.attention.head_dim_v);
  T* row_max = statistic_row<T>(params.row_max, params.row_max_strides, sequence, tile.head);
  T* row_sum = statistic_row<T>(params.row_sum, params.row_sum_strides, sequence, tile.head);

#pragma unroll
  for (int i = 0; i < Shape::rows; ++i) {
    const int row = tile.first_row + ForwardMainloop<config>::lane_row() + i * LaneGrid::rows;
    if (row >= sequence.seqlen_q) continue;
    T factor = T(1);
    if constexpr (config.sinks) {
      factor =
          state.softmax.add_sink(i, T(params.sinks[tile.head * params.attention.sinks_stride]));
    }
    factor *= inverse_sum(state.softmax.row_sum[i]);
    if constexpr (config.dropout) factor *= T(params.attention.keep_factor);
    if constexpr (config.float8_keys()) {
      factor *= descaled_value<T>(params, sequence, tile.head);
    }
    store_row<config.store_width>(out, row, state.sums.at[i], factor);
    if (LaneGrid::col() != 0) continue;
    if (row_max != nullptr) row_max[row * params.row_max_strides.row] = state.softmax.row_max[i];
    if (row_sum != nullptr) row_sum[row * params.row_sum_strides.row] = state.softmax.row_sum[i];
  }
}

}  // namespace cupyflash
