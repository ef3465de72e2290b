// Keys and values of a cache to shared memory, by the warps that share them: four threads a row,
// whatever block it stands in.
#pragma once

#include "decode/block_numbers.cuh"
#include "decode/shape.cuh"
#include "tile/load_swizzled.cuh"

namespace cupyflash {

/// Copies the thread's chunks of a row of `tile`: every fourth from `chunk` on.
template <int width, class Tile, class Element>
__device__ inline void load_row(const Tile& tile, int row, int chunk, const Element* source,
                                bool inside, int dim) {
  constexpr int elements = 16 / sizeof(Element);  // of a chunk
  const ColumnWalk<Tile> target = {tile.chunk(row, chunk)};
#pragma unroll
  for (int c = 0; c < Tile::chunks / 4; ++c) {
    const int col = (chunk + 4 * c) * elements;
    copy_chunk<width>(target.at(2 * c), source + col, inside, dim - col);
  }
}

template <DecodeConfig config>
class CacheLoader {
 public:
  using Shape = DecodeShape<config>;
  using Input = Element<config.kv_dtype>;
  static constexpr int rows_per_pass = 8 * config.row_warps;
  static constexpr int passes = (config.warp_keys + rows_per_pass - 1) / rows_per_pass;
  static_assert(config.warp_keys % 8 == 0);
  static constexpr bool whole_steps =
      config.page_size > 0 && config.page_size % config.warp_keys == 0;
  using Numbers = typename Either<whole_steps, StepNumbers<config>,
                                  RowNumbers<config, passes, rows_per_pass>>::Type;

  /// `thread` counts those that share keys.
  __device__ CacheLoader(const CacheParams& params, const CacheEntry& entry, int head_kv,
                         Range valid, int thread)
      : params_(params),
        blocks_(params, entry.index),
        key_(static_cast<const Input*>(params.key) + head_kv * params.key_strides.head),
        value_(static_cast<const Input*>(params.value) + head_kv * params.value_strides.head),
        valid_(valid),
        row_(thread / 4),
        chunk_(thread % 4) {}

  /// Prepares for the first step, whose keys are first_key ...
  __device__ void start(int first_key) { numbers_.start(blocks_, valid_, first_key, row_); }
  /// Prepares for the next one.
  __device__ void advance(int first_key) { numbers_.advance(blocks_, valid_, first_key, row_); }

  /// Copies the keys and values that were prepared for; those that nobody sees become 0.
  __device__ void load(const typename Shape::KeyTile& key_tile,
                       const typename Shape::ValueTile& value_tile, int first_key) {
    numbers_.take();
#pragma unroll
    for (int pass = 0; pass < passes; ++pass) {
      const int row = row_ + pass * rows_per_pass;
      if (config.warp_keys % rows_per_pass != 0 && row >= config.warp_keys) break;
      const int position = first_key + row;
      const bool inside = valid_.contains(position);
      const CachePlace place = blocks_.place(numbers_.of_row(pass), inside ? position : 0);
      if (inside && !place.exists) params_.faults[1] = 1;
      const int64 block = place.block, token = place.row;
      load_row<config.cache_width>(
          key_tile, row, chunk_,
          key_ + block * params_.key_strides.batch + token * params_.key_strides.row, inside,
          params_.attention.head_dim);
      load_row<config.cache_width>(
          value_tile, row, chunk_,
          value_ + block * params_.value_strides.batch + token * params_.value_strides.row, inside,
          params_.attention.head_dim_v);
    }
  }

 private:
  const CacheParams& params_;
  CacheBlocks<config.page_size> blocks_;
  const Input* key_;
  const Input* value_;
  Range valid_;
  int row_;
  int chunk_;
  Numbers numbers_;
};

/// Copies the tile's rows; those that do not exist become 0.
template <DecodeConfig config>
__device__ inline void load_queries(const CacheParams& params,
                                    const typename DecodeShape<config>::QueryTile& tile,
                                    const RowTile& rows, int entry, int head_kv) {
  using Input = Element<config.dtype>;
  const Strides& strides = params.attended_strides;
  const Input* const first = static_cast<const Input*>(params.attended) + entry * strides.batch +
                             int64(head_kv) * rows.group_size * strides.head;
  for (int row = int(threadIdx.x) / 4; row < config.rows(); row += config.threads() / 4) {
    const int index = rows.first_row + row;
    const bool inside = index < rows.rows;
    const int64 query = rows.query(index), head = rows.head(index);
    load_row<config.load_width>(tile, row, int(threadIdx.x) % 4,
                                first + query * strides.row + head * strides.head, inside,
                                params.attention.head_dim);
  }
}

}  // namespace cupyflash
