// The gradient of the additive bias: dS in the bias's own shape. What has one score is written, the
// rest is summed up within a warp and then added to global memory.
#pragma once

#include "arch/convert.cuh"
#include "arch/ldmatrix.cuh"
#include "arch/pack.cuh"
#include "arch/reduce.cuh"
#include "attention/config_mma.cuh"
#include "attention/sequence.cuh"
#include "backward/bias_sums_mma.cuh"
#include "tile/fragment_mma.cuh"

namespace cupyflash {

/// Of one query head.
template <MmaBackwardConfig config>
struct BiasGradient {
  using Target = Element<config.grad_bias_dtype>;

  Target* first;  // row 0, column 0
  ScoreStrides strides;
  float factor;  // that gradients of scores wait for
  int plane;     // of the bias, counted over sequences and heads that have their own

  __device__ BiasGradient(const BackwardParams& params, const Sequence& sequence, int head,
                          float factor)
      : factor(factor) {
    if constexpr (config.bias) {
      const int batch = score_batch(sequence, params.attention.batch);
      strides = params.grad_bias_strides;
      first = static_cast<Target*>(params.grad_bias) + batch * strides.batch + head * strides.head;
      if constexpr (config.bias_in_tiles) {
        plane = (strides.batch == 0 ? 0 : batch) * heads(params) + (strides.head == 0 ? 0 : head);
      }
    }
  }
  /// Of a plane.
  __device__ BiasGradient(const BackwardParams& params, int plane, float factor)
      : strides(params.grad_bias_strides), factor(factor), plane(plane) {
    first = static_cast<Target*>(params.grad_bias) + plane / heads(params) * strides.batch +
            plane % heads(params) * strides.head;
  }

  /// That have planes of their own.
  __device__ static int heads(const BackwardParams& params) {
    return params.grad_bias_strides.head == 0 ? 1 : params.attention.num_heads;
  }

  /// Of an element that does not exist, nothing.
  __device__ void put(int query, int key, float value) const {
    if (!strides.contains(query, key)) return;
    Target* target = first + strides.at(query, key);
    if constexpr (config.bias_shared && !config.bias_in_tiles) {
      reduce_add(target, value);
    } else {
      *target = from_accumulator<Target>(value);
    }
  }
};

/// Eight neighbours, written or added; 16-byte accesses.
template <DataType dtype, bool shared>
__device__ void put_neighbours(Element<dtype>* target, const float (&values)[8]) {
  if constexpr (sizeof(Element<dtype>) == 2) {
    unsigned pairs[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) pairs[e] = pack_pair<dtype>(values[2 * e], values[2 * e + 1]);
    *reinterpret_cast<uint4*>(target) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  } else {
#pragma unroll
    for (int e = 0; e < 8; e += 4) {
      const float4 four = make_float4(values[e], values[e + 1], values[e + 2], values[e + 3]);
      if constexpr (shared) {
        reduce_add(target + e, four);
      } else {
        *reinterpret_cast<float4*>(target + e) = four;
      }
    }
  }
}

/// Four registers of a lane moved up by `count` places, the last ones to the front.
__device__ inline void rotate(unsigned (&values)[4], int count) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    unsigned moved[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) moved[e] = values[(e - step) & 3];
#pragma unroll
    for (int e = 0; e < 4; ++e) values[e] = count & step ? moved[e] : values[e];
  }
}

/// Writes, or adds, a whole tile out of shared memory, where dS^T lies rounded: 8 queries by 32
/// keys at a time, of which a lane gets eight neighbouring keys of a query.
template <MmaBackwardConfig config, class Tile>
__device__ void write_bias_gradient(const BiasGradient<config>& gradient, const Tile& tile,
                                    int first_query, int first_key) {
  using Target = typename BiasGradient<config>::Target;
  constexpr int units = config.block_m / 8 * (config.block_n / 32);
  constexpr bool as_stored = config.grad_bias_dtype == config.dtype && !config.dropout;
  const int lane = MmaLane::lane(), quad = lane & 3;
  // Matrix lane / 8, row lane % 8, for ldmatrix: pairs of keys such that, transposed, lane q of
  // four gets keys 8 q ... 8 q + 7, and that eight rows of a matrix lie in different banks.
  const int pair = lane >> 1 & 3;
  const int key = pair * 8 + ((lane / 8 + pair) & 3) * 2 + (lane & 1);
  const bool aligned = gradient.strides.row % 8 == 0;  // of eight neighbours all exist, or none
#pragma unroll 1
  for (int unit = warp_index(); unit < units; unit += config.warps()) {
    const int rows = unsigned(unit) % (config.block_m / 8),
              cols = unsigned(unit) / (config.block_m / 8) * 32;
    unsigned pairs[4];
    load_matrices_transposed(pairs, tile.chunk(cols + key, rows));
    rotate(pairs, quad);
    const int query = first_query + rows * 8 + lane / 4, target_key = first_key + cols + quad * 8;
    if (!gradient.strides.contains(query, target_key)) continue;
    Target* target = gradient.first + query * gradient.strides.row + target_key;
    if constexpr (as_stored) {
      if (aligned) {
        *reinterpret_cast<uint4*>(target) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        continue;
      }
    }
    float values[8];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float2 two = unpack_pair<config.dtype>(pairs[e]);
      values[2 * e] = two.x * gradient.factor;
      values[2 * e + 1] = two.y * gradient.factor;
    }
    if (aligned) {
      put_neighbours<config.grad_bias_dtype, config.bias_shared>(target, values);
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) gradient.put(query, target_key + e, values[e]);
    }
  }
}

/// Takes the pieces of a warp's transposed tile of dS, one after the other.
template <MmaBackwardConfig config, int m_tiles, int n_tiles>
class BiasGradientTile {
 public:
  /// Of the warp's first query and key.
  __device__ BiasGradientTile(const BackwardParams& params, const BiasGradient<config>& gradient,
                              int first_query, int first_key)
      : gradient_(gradient),
        query_(first_query + MmaLane::col()),
        key_(first_key + MmaLane::row()) {
    if constexpr (config.bias_in_tiles) {
      tile_sums_ = BiasSums<config>(params).part(gradient.plane, first_query / config.block_m,
                                                 first_key / config.block_n);
    }
  }

  __device__ void add(int i, int j, const float (&slopes)[4]) {
    if constexpr (config.bias_in_tiles) {
      reduce_add(tile_sums_ + BiasSums<config>::piece(i, j),
                 make_float4(slopes[0], slopes[1], slopes[2], slopes[3]));
    } else {
      add_each(i, j, slopes);
    }
  }

  __device__ void finish() {
    if constexpr (!config.bias_in_tiles) finish_sums();
  }

 private:
  static constexpr int most = m_tiles > n_tiles ? m_tiles : n_tiles;

  const BiasGradient<config>& gradient_;
  int query_;
  int key_;
  float* tile_sums_;
  float sums_[2 * most] = {};

  __device__ void add_each(int i, int j, const float (&slopes)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if constexpr (config.bias_rows && config.bias_cols) {
        gradient_.put(query_ + j * 8 + e % 2, key_ + i * 16 + e / 2 * 8,
                      slopes[e] * gradient_.factor);
      } else if constexpr (config.bias_cols) {
        sums_[2 * i + e / 2] += slopes[e];
      } else if constexpr (config.bias_rows) {
        sums_[2 * j + e % 2] += slopes[e];
      } else {
        sums_[0] += slopes[e];
      }
    }
  }

  __device__ void finish_sums() {
    if constexpr (config.bias_cols && !config.bias_rows) {
#pragma unroll
      for (int r = 0; r < 2 * m_tiles; ++r) {
        const float sum = quad_total(sums_[r]) * gradient_.factor;
        if (MmaLane::col() == 0) gradient_.put(0, key_ + r * 8, sum);
      }
    } else if constexpr (config.bias_rows && !config.bias_cols) {
#pragma unroll
      for (int c = 0; c < 2 * n_tiles; ++c) {
        const float sum = row_group_total(sums_[c]) * gradient_.factor;
        if (MmaLane::row() == 0) gradient_.put(query_ + c / 2 * 8 + c % 2, 0, sum);
      }
    } else if constexpr (!config.bias_rows) {
      const float sum = row_group_total(quad_total(sums_[0])) * gradient_.factor;
      if (MmaLane::lane() == 0) gradient_.put(0, 0, sum);
    }
  }

  /// Over the eight lanes that share a column.
  __device__ static float row_group_total(float value) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) {
      value += __shfl_xor_sync(0xffffffffu, value, lanes);
    }
    return value;
  }
};

}  // namespace cupyflash
