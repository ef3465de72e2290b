// What a block adds to the gradients of all queries, out of dS in shared memory: dQ, by additions
// to float32 sums in global memory, and the bias's gradient.
#pragma once

#include "arch/opaque.cuh"
#include "arch/reduce.cuh"
#include "attention/query_sums.cuh"
#include "backward/block_mma.cuh"

namespace cupyflash {

template <MmaBackwardConfig config>
struct MmaQueryGradient {
  using Block = MmaBackwardBlock<config>;
  using Shape = typename Block::Shape;
  using Head = typename Block::Head;
  using ScoreTile = typename Block::ScoreTile;
  using KeyTile = typename Block::KeyTile;

  /// dQ / softmax_scale += dS K of tile m, added to global memory; without keys that no row sees.
  __device__ static void add(const Block& block, const Head& head, int slot, int m, bool hidden) {
    constexpr int rows = Shape::sum_m_tiles * 16, cols = Shape::sum_n_tiles * 8;
    constexpr int steps = config.block_n / 16;
    using Sums = QuerySums<config.head_dim>;
    const int row_part = Shape::warp() / Shape::dim_warps;
    const int col_part = Shape::warp() % Shape::dim_warps;
    const PartialWalk<ScoreTile, rows / 16> left(
        WalkOf<ScoreTile>::right(block.score_tile(slot), 0), row_part);
    const PartialWalk<KeyTile, cols / 16> right(WalkOf<KeyTile>::left(block.key_tile(), 0),
                                                col_part);
    unsigned a[steps][rows / 16][4];
#pragma unroll
    for (int step = 0; step < steps; ++step) {
#pragma unroll
      for (int i = 0; i < rows / 16; ++i)
        load_matrices_transposed(a[step][i], left.at(i, step * 16));
    }
    UsedColumns<steps> used;
    if (config.hides() && hidden) {
#pragma unroll
      for (int step = 0; step < steps; ++step) used.see(a[step], step);
      used.share();
    }
    const int lane = MmaLane::lane();
    const int first_row = m * config.block_m + row_part * rows + lane / 4;
    await_own_turn(block, head, m);
    const Sums all{head.params.query_sums};
    float* target = all.row(opaque(head.scratch) + first_row) + Sums::offset(lane % 4 * 2) +
                    col_part * (cols / 16) * Sums::group;
    // Few columns at a time, so that additions to memory spread over the products.
#pragma unroll
    for (int pair = 0; pair < cols / 16; ++pair) {
      MmaFragment<rows / 16, 2> sums;
      sums.fill(0.0f);
#pragma unroll
      for (int step = 0; step < steps; ++step) {
        if (config.hides() && hidden) {
          accumulate_used_slice<config.dtype>(sums, a[step], right, used, step, pair, 0);
        } else {
          accumulate_slice<config.dtype>(sums, a[step], right, step, pair, 0);
        }
      }
#pragma unroll
      for (int i = 0; i < rows / 16; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          // Behind a sequence's rows lie another's: a key that holds NaN makes 0 * NaN for them.
          if (config.varlen && first_row + i * 16 + r * 8 >= block.band.rows) continue;
          const float (&left_half)[4] = sums.at[i][0];
          const float (&right_half)[4] = sums.at[i][1];
          reduce_add(target + (i * 16 + r * 8) * config.head_dim + pair * Sums::group,
                     make_float4(left_half[2 * r], left_half[2 * r + 1], right_half[2 * r],
                                 right_half[2 * r + 1]));
        }
      }
    }
    if constexpr (config.deterministic) {
      __syncthreads();
      if (threadIdx.x == 0) end_turn(head.turns + m);
    }
  }

  /// The bias's gradient of tile m, where it can be had from dS in shared memory.
  __device__ static void put_bias(const Block& block, const Head& head, int slot, int m) {
    if constexpr (Block::staged_bias) {
      write_bias_gradient<config>(head.grad_bias, block.score_tile(slot), m * config.block_m,
                                  block.first_key);
    }
  }

 private:
  /// Key tiles from `begin` on that the query tile sees before tile `end`.
  __device__ static int earlier_tiles(const Head& head, int m, int begin, int end) {
    const BackwardParams& common = head.params.common;
    return key_tile_states<config>(common, common.visibility, head.batch, head.index, m)
        .count(begin, end);
  }

  /// Waits until all earlier key tiles that see this query tile have added theirs. Blocks start in
  /// the order of their key tiles, so the one waited for is running or done.
  __device__ static void await_own_turn(const Block& block, const Head& head, int m) {
    if constexpr (config.deterministic) {
      const Range queries = {m * config.block_m, (m + 1) * config.block_m};
      const int first_tile = block.band.seen_by_any(queries).begin / config.block_n;
      const int tile = block.first_key / config.block_n;
      const int turn =
          config.visibility ? earlier_tiles(head, m, first_tile, tile) : tile - first_tile;
      if (threadIdx.x == 0) await_turn(head.turns + m, turn);
      __syncthreads();
    }
  }
};

}  // namespace cupyflash
