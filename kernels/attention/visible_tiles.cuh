// Which tiles masks and block masks hide: found once by a small kernel, so that the main loops
// neither read nor compute those, and test elements only where a tile is mixed.
#pragma once

#include "attention/element_mask.cuh"

namespace cupyflash {

enum class TileState : uint8 { hidden, mixed, visible };

/// Where the state of a tile lies: (batch or 1, heads or 1, query tiles or 1, key tiles or 1), the
/// axes being broadcast as those of all masks together are.
template <auto config>
struct TileMap {
  int batch;
  int heads;
  int rows;
  int cols;

  template <class Params>
  __device__ explicit TileMap(const Params& params)
      : batch(params.scores.map_batch),
        heads(params.scores.map_heads),
        rows(ceil_div(params.scores.map_rows, config.block_m)),
        cols(ceil_div(params.scores.map_cols, config.block_n)) {}

  __device__ int64 size() const { return int64(batch) * heads * rows * cols; }

  __device__ int64 offset(int batch_index, int head, int row, int col) const {
    const int64 pair = int64(batch == 1 ? 0 : batch_index) * heads + (heads == 1 ? 0 : head);
    return (pair * rows + (rows == 1 ? 0 : row)) * cols + (cols == 1 ? 0 : col);
  }
};

/// The states of the tiles along one row or column of the map.
template <bool given>
struct TileStates {
  const TileState* first = nullptr;
  int64 stride = 0;

  /// The first tile from n on that is not hidden, at most `end`; to be called by whole warps.
  __device__ int next(int n, int end) const {
    if constexpr (given) {
      for (; n < end; n += 32) {
        const int mine = n + int(threadIdx.x & 31);
        const bool shown = mine < end && first[mine * stride] != TileState::hidden;
        const unsigned found = __ballot_sync(0xffffffffu, shown);
        if (found != 0) return n + __ffs(found) - 1;
      }
      return end;
    } else {
      return n;
    }
  }

  /// Whether the elements of tile n have to be tested.
  __device__ bool mixed(int n) const { return given && first[n * stride] == TileState::mixed; }
};

/// The key tiles of a row of tiles.
template <auto config, class Params>
__device__ TileStates<config.visibility> key_tile_states(const Params& params,
                                                         const uint8* visibility, int batch,
                                                         int head, int query_tile) {
  if constexpr (config.visibility) {
    const TileMap<config> map(params);
    const auto* states = reinterpret_cast<const TileState*>(visibility);
    return {states + map.offset(batch, head, query_tile, 0), map.cols == 1 ? 0 : 1};
  } else {
    return {};
  }
}

/// The query tiles of a column of tiles.
template <auto config, class Params>
__device__ TileStates<config.visibility> query_tile_states(const Params& params,
                                                           const uint8* visibility, int batch,
                                                           int head, int key_tile) {
  if constexpr (config.visibility) {
    const TileMap<config> map(params);
    const auto* states = reinterpret_cast<const TileState*>(visibility);
    return {states + map.offset(batch, head, 0, key_tile), map.rows == 1 ? 0 : map.cols};
  } else {
    return {};
  }
}

/// Writes the state of every tile, one warp a tile. Elements past the ends do not count.
template <auto config, class Params>
__device__ void find_visible_tiles(const Params& params, uint8* visibility) {
  const TileMap<config> map(params);
  const int64 index = int64(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  if (index >= map.size()) return;
  const int first_col = int(index % map.cols) * config.block_n;
  const int first_row = int(index / map.cols % map.rows) * config.block_m;
  const int head = int(index / map.cols / map.rows % map.heads);
  const Sequence sequence = {int(index / map.cols / map.rows / map.heads)};
  const int rows = minimum(config.block_m, params.scores.map_rows - first_row);
  const int cols = minimum(config.block_n, params.scores.map_cols - first_col);

  const ElementMask<config> mask(params, sequence, head);
  bool all = true, any = false;
  constexpr int block = 8;  // rows whose loads are under way together
  for (int row = 0; row < rows && (all || !any); row += block) {
#pragma unroll
    for (int r = 0; r < block; ++r) {
      for (int col = threadIdx.x % 32; col < cols; col += 32) {
        if (row + r >= rows) break;
        const bool seen = mask.sees(first_row + row + r, first_col + col);
        all = all && seen;
        any = any || seen;
      }
    }
    all = __all_sync(0xffffffffu, all);
    any = __any_sync(0xffffffffu, any);
  }
  if (threadIdx.x % 32 == 0) {
    const TileState state = all ? TileState::visible : any ? TileState::mixed : TileState::hidden;
    visibility[index] = static_cast<uint8>(state);
  }
}

}  // namespace cupyflash
