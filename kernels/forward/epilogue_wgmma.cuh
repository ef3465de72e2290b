// From a warp's unnormalised sums to out, row_max and row_sum in global memory.
#pragma once

#include "attention/config_wgmma.cuh"
#include "attention/descale.cuh"
#include "attention/key_range.cuh"
#include "attention/online_softmax.cuh"
#include "attention/params_wgmma.cuh"
#include "attention/sequence.cuh"
#include "attention/softmax_wgmma.cuh"
#include "attention/suspects.cuh"
#include "tile/store_quads.cuh"

namespace cupyflash {

/// Where a warp says that it has met NaN; `warp_row` is its first row in tiles.
template <WgmmaForwardConfig config>
__device__ Suspects suspects_of(const ForwardParams& params, int warp_row) {
  return {params, warp_row / 16, 4 * config.consumers()};
}

/// Whether key tiles of a query tile may hold what no row of it sees: always with a bias. Varlen:
/// those that are wider than what it sees.
template <WgmmaForwardConfig config>
__device__ bool meets_others(const ForwardParams& params, const TileIndex& tile) {
  if (!config.varlen) return true;
  const Band band = visible_band<config.window>(params.attention, tile.sequence);
  const Range seen = band.seen_by_any({tile.first_row, tile.first_row + config.block_m});
  return seen.end - seen.begin < config.block_n;
}

/// NaN in rows that exist. It stays NaN in a sum; without one there may be opposite infinities,
/// which are rare enough.
template <int n_tiles, class Softmax>
__device__ bool met_nan(const Softmax& softmax, const MmaFragment<1, n_tiles>& sums, int rows) {
  float total = 0.0f;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (MmaLane::row() + 8 * r >= rows) continue;
    total += softmax.row_sum[r];
#pragma unroll
    for (int j = 0; j < n_tiles; ++j) total += sums.at[0][j][2 * r] + sums.at[0][j][2 * r + 1];
  }
  return total != total;
}

/// `warp_row` is the warp's first row in the tile.
template <WgmmaForwardConfig config, int n_tiles, class Stage>
__device__ void write_forward_wgmma(
    const WgmmaForwardParams& all, const TileIndex& tile, int warp_row,
    WgmmaSoftmax<is_float8(config.dtype), config.unbounded()> softmax,
    const MmaFragment<1, n_tiles>& sums, const Stage& stage) {
  const ForwardParams& params = all.common;
  const Sequence& sequence = tile.sequence;
  float* row_max =
      statistic_row<float>(params.row_max, params.row_max_strides, sequence, tile.head);
  float* row_sum =
      statistic_row<float>(params.row_sum, params.row_sum_strides, sequence, tile.head);
  // In natural units: scores were scaled already, or are now.
  const float unit = softmax.factor * 0.6931471805599453f;
  const float sink = config.sinks ? params.sinks[tile.head * params.attention.sinks_stride] : 0.0f;

  if constexpr (config.meets_others()) {
    const int rows = sequence.seqlen_q - tile.first_row - warp_row;
    suspects_of<config>(params, warp_row)
        .add(meets_others<config>(params, tile) && met_nan(softmax, sums, rows));
  }

  float factor[2], maxima[2], totals[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    OnlineSoftmax<float, 1> row;
    softmax.row_max[r] = quad_maximum(softmax.row_max[r]);
    row.row_max[0] = config.raw_scores ? softmax.row_max[r] * unit : softmax.row_max[r];
    factor[r] = softmax.ratio(softmax.shift[r], softmax.exponent(r));
    row.row_sum[0] = quad_total(softmax.row_sum[r]) * factor[r];
    if constexpr (config.sinks) factor[r] *= row.add_sink(0, sink);
    factor[r] *= row.row_sum[0] == 0.0f ? 0.0f : reciprocal_hardware(row.row_sum[0]);
    if constexpr (is_float8(config.dtype)) {
      factor[r] *= descaled_value<float>(params, sequence, tile.head);
    }
    maxima[r] = row.row_max[0];
    totals[r] = row.row_sum[0];
  }
  // Each lane of a row's four writes one of m and l of two rows.
  const bool is_lower = MmaLane::lane() & 1, is_sum = MmaLane::lane() & 2;
  const float value =
      is_sum ? (is_lower ? totals[1] : totals[0]) : (is_lower ? maxima[1] : maxima[0]);
  float* const statistic = is_sum ? row_sum : row_max;
  const int64 stride = is_sum ? params.row_sum_strides.row : params.row_max_strides.row;
  const int query = tile.first_row + warp_row + is_lower * 8 + MmaLane::row();
  if (statistic != nullptr && query < sequence.seqlen_q) statistic[query * stride] = value;

  const int first_row = tile.first_row + warp_row;
  if constexpr (config.staged > 0) {
    stage.template write<config.out_dtype>(all.out_map, first_row, tile.head, sequence.batch, sums,
                                           factor);
  } else {
    const auto out = head_rows<Element<config.out_dtype>>(params.out, params.out_strides,
                                                          sequence.batch, sequence.first_query,
                                                          tile.head, params.attention.head_dim_v);
    write_rows<config.out_dtype, config.store_width>(out, first_row, sequence.seqlen_q, sums,
                                                     factor);
  }
}

}  // namespace cupyflash
