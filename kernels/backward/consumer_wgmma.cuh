// What every consumer warpgroup of the Hopper backward does: products, P, and the results.
#pragma once

#include "arch/bulk.cuh"
#include "arch/named_barrier.cuh"
#include "arch/reduce.cuh"
#include "attention/mask_mma.cuh"
#include "attention/query_sums.cuh"
#include "attention/score_mma.cuh"
#include "backward/pipeline_wgmma.cuh"
#include "backward/walk_wgmma.cuh"
#include "tile/multiply_wgmma.cuh"
#include "tile/store_quads.cuh"

namespace cupyflash {

/// `count` is the number of query tiles before the one meant, which leads to its buffers; `keys`
/// that of key tiles which any query sees: K and V have one place each.
template <WgmmaBackwardConfig config>
struct BackwardConsumer {
  using Shape = WgmmaBackwardShape<config>;
  using Scores = typename Shape::Scores;
  using Operand = MmaOperand<1, Shape::n_tiles>;
  using Pipeline = BackwardPipeline<config>;
  using Walk = BackwardWalk<config>;
  static constexpr int n_tiles = Shape::n_tiles;

  const WgmmaBackwardParams& params;
  Pipeline pipeline;
  int warp_row;  // first row of this warp in the key tile

  /// Of this warpgroup in the key tile.
  __device__ int first_key_row() const {
    return warp_row / Shape::warpgroup_rows * Shape::warpgroup_rows;
  }

  /// This warp's products have read what the barrier stands for.
  __device__ static void release(AsyncBarrier empty) {
    __syncwarp();
    if (MmaLane::lane() == 0) empty.arrive();
  }

  /// A query tile comes with statistics, which lanes read: each arrives for itself, as racecheck
  /// does not follow one that arrives for all. What it has read must have been used by then:
  /// arriving does not wait for reads that are under way, and copies would overtake them.
  __device__ void release_query(unsigned count) const {
    pipeline.query_empty(Pipeline::QueryPosition::after(count)).arrive();
  }

  /// The last query tile of a key tile has come this far: K or V is not read again.
  __device__ static void release_last(AsyncBarrier empty, const Walk& walk) {
    if constexpr (config.persistent) {
      if (walk.last()) release(empty);
    }
  }

  /// The assembler would move the wait that follows to before the arithmetic that is to run beside
  /// the products; not so if a store, which nobody reads, needs its result first.
  __device__ void hold_back(const Scores& result, int pieces) const {
    unsigned all = 0;
#pragma unroll
    for (int j = 0; j < pieces; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) all |= __float_as_uint(result.at[0][j][e]);
    }
    store_shared(pipeline.scratch(), all);
  }

  /// S^T = K Q^T.
  __device__ void start_scores(Scores& scores, unsigned count) const {
    products_see_registers();
    multiply_rows<config.dtype, config.head_dim / 16>(
        scores, pipeline.key(), first_key_row(),
        pipeline.query(Pipeline::QueryPosition::after(count)));
    commit_products();
  }

  /// dP^T = V dO^T.
  __device__ void start_slopes(Scores& slopes, unsigned count) const {
    const auto at = Pipeline::GradOutPosition::after(count);
    pipeline.grad_out_full(at).wait(at.round);
    products_see_registers();
    multiply_rows<config.dtype, config.head_dim_v / 16>(slopes, pipeline.value(), first_key_row(),
                                                        pipeline.grad_out(at));
    commit_products();
  }

  /// dV += P^T dO, or dK += dS^T Q.
  template <class Sums, class Tile>
  __device__ static void start_sums(Sums& sums, const Operand& left, const Tile& right) {
    products_see_registers();
    accumulate_rows<config.dtype, 0, n_tiles / 2>(sums, left, right);
    commit_products();
  }

  /// Columns 64 * first_panel ... of rows 64 * row_part ... of dQ = dS K.
  template <class Sums, class Tile>
  __device__ void start_query_sums(Sums& sums, const Tile& scores, int row_part,
                                   int first_panel) const {
    products_see_registers();
    multiply_columns<config.dtype>(sums, scores, row_part, pipeline.key(), first_panel);
    commit_products();
  }

  __device__ void await_query(unsigned count) const {
    const auto at = Pipeline::QueryPosition::after(count);
    pipeline.query_full(at).wait(at.round);
  }
  __device__ void await_key(unsigned keys) const { pipeline.key_full().wait(keys & 1); }
  __device__ void await_value(unsigned keys) const { pipeline.value_full().wait(keys & 1); }

  /// Four elements of dS^T = P^T (dP^T - D), rounded; those of two queries and two keys.
  __device__ static void differentiate(Operand& ds, int j, const float (&p)[4],
                                       const float (&slope)[4], float2 delta) {
    ds.upper(0, j) =
        pack_pair<config.dtype>(p[0] * (slope[0] - delta.x), p[1] * (slope[1] - delta.y));
    ds.lower(0, j) =
        pack_pair<config.dtype>(p[2] * (slope[2] - delta.x), p[3] * (slope[3] - delta.y));
  }

  /// L of the lane's two queries in piece j of a query tile, as an exponent of 2; and D.
  __device__ float2 shift_of(unsigned count, int j) const {
    const unsigned shifts = pipeline.shifts(Pipeline::QueryPosition::after(count));
    return load_shared_pair(shifts + 4 * MmaLane::col() + j * 32);
  }
  __device__ float2 delta_of(unsigned count, int j) const {
    const unsigned deltas = pipeline.deltas(Pipeline::QueryPosition::after(count));
    return load_shared_pair(deltas + 4 * MmaLane::col() + j * 32);
  }

  using SumOrder = QuerySums<config.sum_dim()>;

  /// Where a query tile's sums have a lane's first ones, of rows `row` ..., panels `panel` ...
  __device__ static int sums_offset(int row, int panel) {
    return row * config.sum_dim() + SumOrder::offset(panel * 64) + 4 * MmaLane::lane();
  }
  /// Calls visit(distance from there, two numbers, two more) with all of a lane's part of dQ, or
  /// with the columns from `first` on that a memory of `dim` columns has.
  template <int dim = config.sum_dim(), int sum_tiles, class Visit>
  __device__ static void visit_sums(MmaFragment<1, sum_tiles>& sums, const Visit& visit,
                                    int first = 0) {
    constexpr int tiles = sum_tiles < dim / 8 ? sum_tiles : dim / 8;
#pragma unroll
    for (int pair = 0; pair < tiles / 2; ++pair) {
      auto& left = sums.at[0][first / 8 + 2 * pair];
      auto& right = sums.at[0][first / 8 + 2 * pair + 1];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        visit(r * 8 * dim + pair * SumOrder::group, left + 2 * r, right + 2 * r);
      }
    }
  }
  /// Calls put(distance, four numbers).
  template <int dim = config.sum_dim(), int sum_tiles, class Put>
  __device__ static void put_sums(MmaFragment<1, sum_tiles>& sums, const Put& put, int first = 0) {
    const auto visit = [&](int distance, const float* left, const float* right) {
      put(distance, make_float4(left[0], left[1], right[0], right[1]));
    };
    visit_sums<dim>(sums, visit, first);
  }

  /// Adds a warp's part of dQ to global memory; with `deterministic` in this key tile's turn.
  template <int sum_tiles>
  __device__ void add_sums(MmaFragment<1, sum_tiles>& sums, int row, int panel, const Walk& walk,
                           unsigned count) const {
    if constexpr (config.whole_heads) {
      add_own_sums(sums, row, panel, walk);
    } else {
      if constexpr (config.deterministic) pipeline.turn().wait(count & 1);
      add_to(sums, first_sum(walk.pair(params), row, panel, walk));
      if constexpr (config.deterministic) release(pipeline.sums_full());
    }
  }

  /// The same where no other block adds to the head's dQ: key tiles come in order, and each thread
  /// adds to numbers of its own. The first one of a query tile sets them, the last one writes dq.
  template <int sum_tiles>
  __device__ void add_own_sums(MmaFragment<1, sum_tiles>& sums, int row, int panel,
                               const Walk& walk) const {
    const int group = params.common.attention.group_size;
    const int64 slot = int64(blockIdx.x) * group + walk.head - walk.tile.head * group;
    float* const target = first_sum(slot, row, panel, walk);
    const Range tiles = walk.seen_tiles();
    const bool first = walk.number() == tiles.begin;
    if (walk.number() == tiles.end - 1) {
      if (!first) take(sums, target);
      write_query_gradient(sums, row, panel, walk);
    } else if (first) {
      put_sums(sums, [&](int distance, float4 four) { store_sums(target + distance, four); });
    } else {
      add_to(sums, target);
    }
  }

  /// The address of a lane's first sum of a query tile.
  __device__ float* first_sum(int64 pair, int row, int panel, const Walk& walk) const {
    return params.sums_of(pair, walk.first_query(), config.sum_dim()) + sums_offset(row, panel);
  }
  template <int sum_tiles>
  __device__ static void add_to(MmaFragment<1, sum_tiles>& sums, float* target) {
    put_sums(sums, [&](int distance, float4 four) { reduce_add(target + distance, four); });
  }
  /// Adds what this thread has added to memory.
  template <int sum_tiles>
  __device__ static void take(MmaFragment<1, sum_tiles>& sums, const float* source) {
    visit_sums(sums, [&](int distance, float* left, float* right) {
      const float4 earlier = load_sums(source + distance);
      left[0] += earlier.x;
      left[1] += earlier.y;
      right[0] += earlier.z;
      right[1] += earlier.w;
    });
  }

  /// Writes a warp's part of dq.
  template <int sum_tiles>
  __device__ void write_query_gradient(const MmaFragment<1, sum_tiles>& sums, int row, int panel,
                                       const Walk& walk) const {
    const BackwardParams& common = params.common;
    const Attention& attention = common.attention;
    const float scale = float(attention.softmax_scale);
    const float factor[2] = {scale, scale};
    auto target = head_rows<Element<config.dtype>>(common.grad_query, common.grad_query_strides,
                                                   walk.tile.sequence.batch, 0, walk.head,
                                                   attention.head_dim - 64 * panel);
    target.first += 64 * panel;
    write_rows<config.dtype, config.store_width>(target, walk.first_query() + row,
                                                 attention.seqlen_q, sums, factor);
  }

  /// dS^T to shared memory, where products see it when it is published, after a barrier.
  __device__ void share(const Operand& ds, unsigned count) const {
    const auto scores = pipeline.score(count);
#pragma unroll
    for (int step = 0; step < n_tiles / 2; ++step) scores.write(ds.at[step][0], warp_row, step);
  }

  /// Hides scores that queries do not see.
  __device__ void hide(Scores& scores, const Walk& walk) const {
    const TileIndex& tile = walk.tile;
    const int first_query = walk.first_query();
    const Band transposed = walk.band.transposed();
    const Range keys = {tile.first_row, tile.first_row + config.block_n};
    if (!transposed.seen_by_existing(keys).covers({first_query, first_query + config.block_m})) {
      apply_mask(scores, transposed, tile.first_row + warp_row, first_query);
    }
  }

  /// From products to P^T = exp(S - L), of piece j: rounded as an operand where that is done at
  /// once, and in place of the scores what dS is to be multiplied by.
  __device__ void exponentiate(Scores& scores, Operand& p, const Walk& walk, int j,
                               float2 shift) const {
    const Score<config> score(params.common, walk.tile.sequence, walk.head);
    const MmaScore<config> score_of(score);
    float (&s)[4] = scores.at[0][j];
    float probability[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      ScoreAndSlope value = {s[e], 1.0f};
      if constexpr (!config.raw_scores) {
        value = score_of.of(s[e], 0.0f, 0.0f);
        if (s[e] == -infinity<float>) value.value = -infinity<float>;
      }
      probability[e] = exp2_hardware(
          fmaf(value.value, params.exponent_factor, -(e % 2 == 0 ? shift.x : shift.y)));
      s[e] = config.softcap ? probability[e] * value.slope : probability[e];
    }
    if constexpr (config.early) round(p, j, probability);
  }

  /// Four elements of P^T as an operand.
  __device__ static void round(Operand& p, int j, const float (&probability)[4]) {
    p.upper(0, j) = pack_pair<config.dtype>(probability[0], probability[1]);
    p.lower(0, j) = pack_pair<config.dtype>(probability[2], probability[3]);
  }

  /// Writes this warp's keys of dK or dV.
  template <int cols>
  __device__ void write(const TileIndex& tile, void* target, const Strides& strides, int dim,
                        const MmaFragment<1, cols>& sums, float scale) const {
    const float factor[2] = {scale, scale};
    const Sequence& sequence = tile.sequence;
    write_rows<config.dtype, config.store_width>(
        head_rows<Element<config.dtype>>(target, strides, sequence.batch, sequence.first_key,
                                         tile.head, dim),
        tile.first_row + warp_row, sequence.seqlen_k, sums, factor);
  }
};

}  // namespace cupyflash
