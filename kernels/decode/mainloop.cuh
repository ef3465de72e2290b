// The loop over an entry's keys, for few queries: what counts is that copies never stop.
//
//   warp 0   | keys 0 ... 15,  64 ... 79,  128 ...      each of these has a pipeline of its own,
//   warp 1   | keys 16 ... 31, 80 ... 95,  144 ...      which waits for nothing but its copies;
//   ...                                                 `merge` puts their sums together
//
//   copies   | K, V(n + 2) --------------> | K, V(n + 3) --------------> |   with three stages
//   warp     | S(n), P(n), O += P(n) V(n)  | S(n + 1), ...               |
//
// With more rows than 16, warps that share keys are kept in step by barriers of the block.
#pragma once

#include "attention/score_mma.cuh"
#include "decode/load.cuh"
#include "tile/lanes.cuh"

namespace cupyflash {

template <DecodeConfig config>
class DecodeMainloop {
 public:
  using Shape = DecodeShape<config>;
  using State = DecodeState<config>;
  using Scores = typename Shape::Scores;
  using QueryTile = typename Shape::QueryTile;
  using KeyTile = typename Shape::KeyTile;
  using ValueTile = typename Shape::ValueTile;

  __device__ DecodeMainloop(const CacheParams& params, const CacheEntry& entry, int head_kv,
                            const RowTile& rows, unsigned shared)
      : params_(params),
        entry_(entry),
        head_kv_(head_kv),
        rows_(rows),
        band_(params.attention, entry),
        seen_(band_.seen_by_any(rows.queries(rows.first_row, config.rows()))),
        first_warp_row_(rows.first_row + warp_index() % config.row_warps * 16),
        key_warp_(warp_index() / config.row_warps),
        shared_(shared) {}

  /// Keys that rows of the tile see.
  __device__ Range seen() const { return seen_; }

  /// Attends to the keys of these steps.
  __device__ void run(State& state, Range steps) const {
    const int thread = int(threadIdx.x) % (32 * config.row_warps);
    CacheLoader<config> loader(params_, entry_, head_kv_, seen_, thread);
    load_queries<config>(params_, query_tile(), rows_, entry_.index, head_kv_);
    copy_async_commit();
    loader.start(first_key(steps.begin));
#pragma unroll
    for (int ahead = 0; ahead < config.stages - 1; ++ahead) {
      load_step(loader, ahead, steps.begin + ahead, steps.end);
    }
    copy_async_wait_group<config.stages - 1>();
    __syncthreads();
    const Queries queries(*this);
    const LaneRows lane_rows(*this);
    const Range unmasked = band_.seen_by_all(rows_.queries(first_warp_row_, 16));
    state.sums.fill(0.0f);
    int stage = 0, free_stage = config.stages - 1;
    for (int n = steps.begin; n < steps.end; ++n) {
      copy_async_wait_group<config.stages - 2>();
      synchronize();  // all that share this step's keys have copied them, and left the last one's
      load_step(loader, free_stage, n + config.stages - 1, steps.end);
      attend(state, queries, lane_rows, stage, first_key(n), unmasked);
      free_stage = stage;
      stage = stage + 1 < config.stages ? stage + 1 : 0;
    }
    copy_async_wait();
  }

 private:
  /// The warp's rows as operand `a`: the first columns kept, the others read for every step.
  struct Queries {
    static constexpr int kept_steps =
        config.kept_steps < Shape::steps ? config.kept_steps : Shape::steps;
    using Order = typename Either<Shape::float8, Float8Order<QueryTile>, WalkOf<QueryTile>>::Type;
    ColumnWalk<QueryTile> walk;
    unsigned kept[kept_steps > 0 ? kept_steps : 1][4];

    __device__ explicit Queries(const DecodeMainloop& loop)
        : walk(Order::left(loop.query_tile(), warp_index() % config.row_warps * 16)) {
#pragma unroll
      for (int step = 0; step < kept_steps; ++step) load(kept[step], step);
    }

    __device__ void read(unsigned (&a)[4], int step) const {
      if (step >= kept_steps) {
        load(a, step);
        return;
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) a[e] = kept[step][e];
    }

   private:
    __device__ void load(unsigned (&a)[4], int step) const {
      if constexpr (Shape::float8) {
        Order::load(a, walk, step);
      } else {
        load_matrices(a, walk.at(step));
      }
    }
  };

  /// The two rows of a lane; rows that do not exist do as the last one.
  struct LaneRows {
    int query[2];
    MmaScore<config> score[2];

    __device__ explicit LaneRows(const DecodeMainloop& loop)
        : query{loop.rows_.query(loop.lane_row(0)), loop.rows_.query(loop.lane_row(1))},
          score{loop.score_of(loop.lane_row(0)), loop.score_of(loop.lane_row(1))} {}
  };

  __device__ int lane_row(int r) const {
    return minimum(first_warp_row_ + 8 * r + MmaLane::row(), rows_.rows - 1);
  }
  __device__ MmaScore<config> score_of(int row) const {
    const int head = head_kv_ * rows_.group_size + rows_.head(row);
    return MmaScore<config>(Score<config>(params_, entry_.sequence(params_.attention), head));
  }

  __device__ QueryTile query_tile() const { return {shared_}; }
  __device__ KeyTile key_tile(int stage) const {
    return {shared_ + QueryTile::bytes + (key_warp_ * config.stages + stage) * Shape::stage_bytes};
  }
  __device__ ValueTile value_tile(int stage) const {
    return {key_tile(stage).address + KeyTile::bytes};
  }
  /// The warp's own of step n.
  __device__ int first_key(int n) const { return n * config.keys() + key_warp_ * config.warp_keys; }

  __device__ static void synchronize() {
    if constexpr (config.row_warps == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  /// Copies step n, if there is one, and prepares for the next. Each is a group, even if empty.
  __device__ void load_step(CacheLoader<config>& loader, int stage, int n, int end) const {
    if (n < end) {
      loader.load(key_tile(stage), value_tile(stage), first_key(n));
      if (n + 1 < end) loader.advance(first_key(n + 1));
    }
    copy_async_commit();
  }

  __device__ void attend(State& state, const Queries& queries, const LaneRows& lane_rows, int stage,
                         int first_key, Range unmasked) const {
    Scores scores;
    scores.fill(0.0f);
    multiply(scores, queries, WalkOf<KeyTile>::right(key_tile(stage), 0));
    finish_scores(scores, lane_rows, first_key, unmasked);
#pragma unroll
    for (int j = 0; j < Shape::n_tiles; ++j) state.softmax.see(0, scores.at[0][j]);
    if (state.softmax.must_follow()) rescale(state);
    typename Shape::Probabilities p;
#pragma unroll
    for (int j = 0; j < Shape::n_tiles; ++j) {
      state.softmax.template exponentiate<Shape::value_dtype>(0, scores.at[0][j], p.upper(0, j),
                                                              p.lower(0, j));
    }
    accumulate(state, p, WalkOf<ValueTile>::left(value_tile(stage), 0));
  }

  /// scores += Q K^T.
  __device__ static void multiply(Scores& scores, const Queries& queries,
                                  const ColumnWalk<KeyTile>& keys) {
    constexpr int together = Shape::float8 ? 2 : 1;
#pragma unroll
    for (int step = 0; step < Shape::steps / together; ++step) {
      unsigned a[together][4];
#pragma unroll
      for (int i = 0; i < together; ++i) queries.read(a[i], together * step + i);
      if constexpr (Shape::float8) {
        multiply_float8_slice<config.dtype>(scores, a, keys, step);
      } else {
        multiply_slice<config.dtype>(scores, a, keys, step);
      }
    }
  }

  /// O += P V.
  __device__ static void accumulate(State& state, const typename Shape::Probabilities& p,
                                    const ColumnWalk<ValueTile>& values) {
#pragma unroll
    for (int step = 0; step < Shape::steps_v; ++step) {
      if constexpr (Shape::float8) {
#pragma unroll
        for (int four = 0; four < Shape::pairs_v / 2; ++four) {
          accumulate_float8_slice<Shape::value_dtype>(state.sums, p.at[step][0], values, step,
                                                      four);
        }
      } else {
#pragma unroll
        for (int pair = 0; pair < Shape::pairs_v; ++pair) {
          accumulate_slice<config.dtype>(state.sums, p.at[step], values, step, pair, pair);
        }
      }
    }
  }

  /// From products to scores: what is left to do of scale, softcap and ALiBi, and the mask.
  __device__ void finish_scores(Scores& scores, const LaneRows& rows, int first_key,
                                Range unmasked) const {
    const int first_col = first_key + MmaLane::col();
    if constexpr (!config.raw_scores || config.alibi) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float distance = float(rows.query[r] + rows.score[r].diagonal - first_col);
#pragma unroll
        for (int j = 0; j < Shape::n_tiles; ++j) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& value = scores.at[0][j][2 * r + c];
            value = rows.score[r].of(value, 0.0f, distance - float(8 * j + c)).value;
          }
        }
      }
    }
    if (unmasked.covers({first_key, first_key + config.warp_keys})) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Range seen = band_.seen_by(rows.query[r]);
#pragma unroll
      for (int j = 0; j < Shape::n_tiles; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (!seen.contains(first_col + 8 * j + c)) scores.at[0][j][2 * r + c] = -infinity<float>;
        }
      }
    }
  }

  __device__ static void rescale(State& state) {
    float correction[1][2];
    state.softmax.follow(correction);
#pragma unroll
    for (int j = 0; j < Shape::Sums::n_tiles; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) state.sums.at[0][j][e] *= correction[0][e >> 1];
    }
  }

  const CacheParams& params_;
  const CacheEntry& entry_;
  int head_kv_;
  const RowTile& rows_;
  CacheBand<config.window> band_;
  Range seen_;
  int first_warp_row_;
  int key_warp_;
  unsigned shared_;
};

}  // namespace cupyflash
