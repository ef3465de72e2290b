// The end of a decoding block: the sums of its warps become the output, or a split's part of it.
#pragma once

#include "decode/finish.cuh"
#include "decode/mainloop.cuh"

namespace cupyflash {

template <DecodeConfig config>
class DecodeMerge {
 public:
  using Shape = DecodeShape<config>;

  /// `memory` is the block's shared memory, which nothing is copied to any more.
  __device__ DecodeMerge(const CacheParams& params, const CacheEntry& entry, int head_kv,
                         const RowTile& rows, float* memory)
      : params_(params),
        entry_(entry),
        head_kv_(head_kv),
        rows_(rows),
        memory_(memory),
        warp_(warp_index()) {}

  /// Writes the rows of the tile, as far as they exist.
  __device__ void write(DecodeState<config>& state, int split) const {
    __syncthreads();  // all warps have read what they need of keys and values
    put_statistics(state);
    __syncthreads();
    put_sums(state);
    __syncthreads();
    constexpr int parts = config.head_dim_v / 8;  // of a row
    for (int index = threadIdx.x; index < config.rows() * parts; index += config.threads()) {
      const int row = index / parts, col = index % parts * 8;
      if (rows_.first_row + row >= rows_.rows) continue;
      if constexpr (config.split) {
        write_partial(row, col, split);
      } else {
        write_output(row, col);
      }
    }
  }

 private:
  __device__ int own_row(int r) const {
    return warp_ % config.row_warps * 16 + 8 * r + MmaLane::row();
  }
  /// Of row `row`, found by the warps of part `part` of the keys.
  __device__ float* statistics(int part, int row) const {
    return memory_ + 2 * (part * config.rows() + row);
  }
  __device__ float* sums(int part, int row) const {
    return memory_ + Shape::statistics + (part * config.rows() + row) * Shape::sums_pitch;
  }

  __device__ void put_statistics(DecodeState<config>& state) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = quad_total(state.softmax.row_sum[0][r]);
      if (MmaLane::col() != 0) continue;
      float* target = statistics(warp_ / config.row_warps, own_row(r));
      target[0] = state.softmax.shift[0][r];
      target[1] = sum;
    }
  }

  /// Of all warps together.
  __device__ RowStatistics merged(int row) const {
    RowStatistics result = {statistics(0, row)[0], 0.0f};
#pragma unroll
    for (int part = 1; part < config.key_warps; ++part) {
      result.shift = fmaxf(result.shift, statistics(part, row)[0]);
    }
#pragma unroll
    for (int part = 0; part < config.key_warps; ++part) {
      const float* one = statistics(part, row);
      result.sum = fmaf(one[1], exp2_hardware(one[0] - result.shift), result.sum);
    }
    return result;
  }

  /// Relative to the shift of all warps together.
  __device__ void put_sums(DecodeState<config>& state) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float factor = exp2_hardware(state.softmax.shift[0][r] - merged(own_row(r)).shift);
      float* target = sums(warp_ / config.row_warps, own_row(r));
#pragma unroll
      for (int j = 0; j < config.head_dim_v / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          target[Shape::sums_column(j, e)] = state.sums.at[0][j][2 * r + e] * factor;
        }
      }
    }
  }

  /// Eight columns of all warps together.
  __device__ void total(float (&result)[8], int row, int col) const {
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      result[c] = sums(0, row)[col + c];
#pragma unroll
      for (int part = 1; part < config.key_warps; ++part) result[c] += sums(part, row)[col + c];
    }
  }

  __device__ void write_partial(int row, int col, int split) const {
    const int64 pair = int64(entry_.index) * (params_.attention.num_heads / rows_.group_size);
    const int64 index =
        ((pair + head_kv_) * rows_.rows + rows_.first_row + row) * params_.num_splits + split;
    float values[8];
    total(values, row, col);
    float* target = params_.partial_sums + index * config.head_dim_v + col;
#pragma unroll
    for (int c = 0; c < 8; c += 4) {
      *reinterpret_cast<float4*>(target + c) =
          make_float4(values[c], values[c + 1], values[c + 2], values[c + 3]);
    }
    if (col == 0) {
      const RowStatistics both = merged(row);
      params_.partial_statistics[2 * index] = both.shift;
      params_.partial_statistics[2 * index + 1] = both.sum;
    }
  }

  __device__ void write_output(int row, int col) const {
    using Part = Vector<Element<config.dtype>, config.store_width>;
    const int query = rows_.query(rows_.first_row + row);
    const int head = head_kv_ * rows_.group_size + rows_.head(rows_.first_row + row);
    const RowResult result = finish_row<config>(params_, entry_, merged(row), head);
    float values[8];
    total(values, row, col);
    const auto target = head_rows<Element<config.dtype>>(
        params_.out, params_.out_strides, entry_.index, 0, head, params_.attention.head_dim_v);
#pragma unroll
    for (int c = 0; c < 8; c += config.store_width) {
      if (col + c >= target.dim) break;
      Part part;
#pragma unroll
      for (int w = 0; w < config.store_width; ++w) {
        part[w] = from_accumulator<Element<config.dtype>>(values[c + w] * result.factor);
      }
      *reinterpret_cast<Part*>(target.row(query) + col + c) = part;
    }
    if (col == 0) write_lse(params_, entry_.index, head, query, result.lse);
  }

  const CacheParams& params_;
  const CacheEntry& entry_;
  int head_kv_;
  const RowTile& rows_;
  float* memory_;
  int warp_;
};

}  // namespace cupyflash
