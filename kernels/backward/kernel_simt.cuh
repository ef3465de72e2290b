// Backward (FlashAttention-2, Algorithm 2) in three launches: delta, then dk and dv with one block
// a (key tile, key-value head, batch), then dq with one block a (query tile, head, batch).
// Nothing is added from two blocks, so results are the same bits in every run.
#pragma once

#include "backward/delta.cuh"
#include "backward/mainloop_dkdv_simt.cuh"
#include "backward/mainloop_dq_simt.cuh"

namespace cupyflash {

/// Rows of a head of a query-side array.
template <class Element, class Pointer>
__device__ GlobalRows<Element> query_rows(Pointer pointer, const Strides& strides,
                                          const Sequence& sequence, int head, int dim) {
  return head_rows<Element>(pointer, strides, sequence.batch, sequence.first_query, head, dim);
}

/// Rows of a head of a key-side array.
template <class Element, class Pointer>
__device__ GlobalRows<Element> key_rows(Pointer pointer, const Strides& strides,
                                        const Sequence& sequence, int head, int dim) {
  return head_rows<Element>(pointer, strides, sequence.batch, sequence.first_key, head, dim);
}

template <BackwardConfig config>
__device__ void key_gradient_simt(const BackwardParams& params) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  auto& storage = *reinterpret_cast<KeyGradientStorage<config>*>(shared_memory);
  using Mainloop = KeyGradientMainloop<config>;
  using Shape = typename Mainloop::Shape;
  using T = typename Shape::T;
  using Output = Element<config.dtype>;
  using Input = const Output;

  const Attention& attention = params.attention;
  const TileIndex tile = locate_tile<config.varlen, config.window, true, config.block_n>(
      params, blockIdx.x, attention.num_heads / attention.group_size);
  const Sequence& sequence = tile.sequence;
  if (tile.first_row >= sequence.seqlen_k) return;
  const int dim = attention.head_dim;
  const int dim_v = attention.head_dim_v;

  const Mainloop mainloop{storage, visible_band<config.window>(attention, sequence),
                          tile.first_row};
  mainloop.load_keys(
      key_rows<Input>(params.key, params.key_strides, sequence, tile.head, dim),
      key_rows<Input>(params.value, params.value_strides, sequence, tile.head, dim_v));
  typename Shape::KeySums grad_key;
  typename Shape::ValueSums grad_value;
  grad_key.fill(T(0));
  grad_value.fill(T(0));
  for (int g = 0; g < attention.group_size; ++g) {
    const int head = tile.head * attention.group_size + g;
    mainloop.run(
        {query_rows<Input>(params.query, params.query_strides, sequence, head, dim),
         query_rows<Input>(params.grad_out, params.grad_out_strides, sequence, head, dim_v),
         statistic_row<const T>(params.row_max, params.row_max_strides, sequence, head),
         statistic_row<const T>(params.row_sum, params.row_sum_strides, sequence, head),
         statistic_row<const T>(params.delta, params.delta_strides, sequence, head),
         params.row_max_strides.row, params.row_sum_strides.row, params.delta_strides.row,
         Score<config>(params, sequence, head), ElementMask<config>(params, sequence, head),
         Dropout<config>(params, sequence, head),
         query_tile_states<config>(params, params.key_visibility, sequence.batch, head,
                                   tile.first_row / config.block_n)},
        grad_key, grad_value);
  }
  Shape::wait_for_copies();
  Shape::store(key_rows<Output>(params.grad_key, params.grad_key_strides, sequence, tile.head, dim),
               tile.first_row, sequence.seqlen_k, grad_key, T(attention.softmax_scale));
  Shape::store(
      key_rows<Output>(params.grad_value, params.grad_value_strides, sequence, tile.head, dim_v),
      tile.first_row, sequence.seqlen_k, grad_value, T(1));
}

/// Statistics of the lane's rows of a query tile. Queries that do not exist get P = 0.
template <BackwardConfig config>
__device__ auto read_statistics(const BackwardParams& params, const Sequence& sequence, int head,
                                int first_row) {
  using Mainloop = QueryGradientMainloop<config>;
  using Shape = typename Mainloop::Shape;
  using T = typename Shape::T;
  const T* row_max = statistic_row<const T>(params.row_max, params.row_max_strides, sequence, head);
  const T* row_sum = statistic_row<const T>(params.row_sum, params.row_sum_strides, sequence, head);
  const T* delta = statistic_row<const T>(params.delta, params.delta_strides, sequence, head);
  typename Mainloop::Statistics statistics;
#pragma unroll
  for (int i = 0; i < Shape::rows; ++i) {
    const int64 row = first_row + Shape::lane_row() + i * LaneGrid::rows;
    const bool exists = row < sequence.seqlen_q;
    statistics.shift[i] = exists ? finite_shift(row_max[row * params.row_max_strides.row]) : T(0);
    statistics.inverse_sum[i] =
        exists ? inverse_sum(row_sum[row * params.row_sum_strides.row]) : T(0);
    statistics.delta[i] = exists ? delta[row * params.delta_strides.row] : T(0);
  }
  return statistics;
}

/// The loop over the key tiles of a query tile.
template <BackwardConfig config>
__device__ QueryGradientMainloop<config> query_mainloop(const BackwardParams& params,
                                                        QueryGradientStorage<config>& storage,
                                                        const Sequence& sequence, int head,
                                                        int first_row) {
  using Input = const Element<config.dtype>;
  const Attention& attention = params.attention;
  const int head_kv = head / attention.group_size;
  const int dim = attention.head_dim;
  const int dim_v = attention.head_dim_v;
  return {storage,
          query_rows<Input>(params.query, params.query_strides, sequence, head, dim),
          query_rows<Input>(params.grad_out, params.grad_out_strides, sequence, head, dim_v),
          key_rows<Input>(params.key, params.key_strides, sequence, head_kv, dim),
          key_rows<Input>(params.value, params.value_strides, sequence, head_kv, dim_v),
          visible_band<config.window>(attention, sequence),
          Score<config>(params, sequence, head),
          ElementMask<config>(params, sequence, head),
          Dropout<config>(params, sequence, head),
          key_tile_states<config>(params, params.visibility, sequence.batch, head,
                                  first_row / config.block_m),
          params.grad_score_params,
          first_row};
}

template <BackwardConfig config>
__device__ void query_gradient_simt(const BackwardParams& params) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  auto& storage = *reinterpret_cast<QueryGradientStorage<config>*>(shared_memory);
  using Shape = typename QueryGradientMainloop<config>::Shape;
  using T = typename Shape::T;

  const Attention& attention = params.attention;
  const TileIndex tile = locate_tile<config.varlen, config.window, false, config.block_m>(
      params, blockIdx.x, attention.num_heads);
  const Sequence& sequence = tile.sequence;
  if (tile.first_row >= sequence.seqlen_q) return;

  const auto statistics = read_statistics<config>(params, sequence, tile.head, tile.first_row);
  const auto mainloop =
      query_mainloop<config>(params, storage, sequence, tile.head, tile.first_row);
  typename Shape::KeySums grad_query;
  grad_query.fill(T(0));
  mainloop.run(statistics, grad_query);
  Shape::store(query_rows<Element<config.dtype>>(params.grad_query, params.grad_query_strides,
                                                 sequence, tile.head, attention.head_dim),
               tile.first_row, sequence.seqlen_q, grad_query, T(attention.softmax_scale));
}

}  // namespace cupyflash
