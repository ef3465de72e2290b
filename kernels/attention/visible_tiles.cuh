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

  __device__ TileState at(int n) const { return first[n * stride]; }

  /// Tiles of [begin, end) that are not hidden; to be called by whole warps.
  __device__ int count(int begin, int end) const {
    int total = 0;
    for (int n = begin; n < end; n += 32) {
      const int mine = n + int(threadIdx.x & 31);
      const bool shown = mine < end && at(mine) != TileState::hidden;
      total += __popc(__ballot_sync(0xffffffffu, shown));
    }
    return total;
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

/// What a warp has seen of a rectangle of a mask.
struct Sight {
  bool all = true;
  bool any = false;

  __device__ void see(bool every, bool some) {
    all = all && every;
    any = any || some;
  }
  /// Combines all lanes; returns whether there is nothing left to learn.
  __device__ bool settle() {
    all = __all_sync(0xffffffffu, all);
    any = __any_sync(0xffffffffu, any);
    return any && !all;
  }
  __device__ TileState state() const {
    return all ? TileState::visible : any ? TileState::mixed : TileState::hidden;
  }
};

/// Rows of 16 neighbouring elements at a time, by one warp.
__device__ inline TileState scan_vectors(const MaskPlane& mask, const Range& rows,
                                         const Range& cols) {
  constexpr int unroll = 8;  // loads under way together
  const int vectors = (cols.end - cols.begin) / 16;
  const int count = (rows.end - rows.begin) * vectors;
  Sight sight;
  for (int base = threadIdx.x % 32; base - int(threadIdx.x % 32) < count; base += 32 * unroll) {
    uint4 loaded[unroll];
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      const int index = minimum(base + u * 32, count - 1);  // again the last, which changes nothing
      const int64 offset = mask.strides.at(rows.begin + index / vectors, cols.begin);
      loaded[u] = reinterpret_cast<const uint4*>(mask.first + offset)[index % vectors];
    }
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      const unsigned words[4] = {loaded[u].x, loaded[u].y, loaded[u].z, loaded[u].w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const bool has_zero = ((words[w] - 0x01010101u) & ~words[w] & 0x80808080u) != 0;
        sight.see(!has_zero, words[w] != 0);
      }
    }
    if (sight.settle()) break;
  }
  return sight.state();
}

/// The same element by element, whatever the strides are.
__device__ inline TileState scan_elements(const MaskPlane& mask, const Range& rows,
                                          const Range& cols) {
  constexpr int unroll = 8;
  Sight sight;
  for (int first = cols.begin; first < cols.end; first += 32) {
    const int col = minimum(first + int(threadIdx.x % 32), cols.end - 1);
    for (int row = rows.begin; row < rows.end; row += unroll) {
      uint8 loaded[unroll];
#pragma unroll
      for (int u = 0; u < unroll; ++u) {
        loaded[u] = mask.first[mask.strides.at(minimum(row + u, rows.end - 1), col)];
      }
#pragma unroll
      for (int u = 0; u < unroll; ++u) sight.see(loaded[u] != 0, loaded[u] != 0);
      if (sight.settle()) return sight.state();
    }
  }
  return sight.state();
}

/// The state of a rectangle of a mask; along broadcast axes one row or column stands for all.
__device__ inline TileState scan(const MaskPlane& mask, Range rows, Range cols) {
  const ScoreStrides& strides = mask.strides;
  if (strides.row == 0) rows = {0, 1};
  if (strides.col == 0) cols = {0, 1};
  const auto address = reinterpret_cast<uint64>(mask.first + strides.at(rows.begin, cols.begin));
  const bool vectors =
      strides.col == 1 && (address | strides.row) % 16 == 0 && (cols.end - cols.begin) % 16 == 0;
  return vectors ? scan_vectors(mask, rows, cols) : scan_elements(mask, rows, cols);
}

/// Blocks of `size` that meet an interval.
__device__ inline Range blocks_of(const Range& indices, int size) {
  return {indices.begin / size, (indices.end - 1) / size + 1};
}

/// Writes the state of every tile, one warp a tile. Elements past the ends do not count. Where
/// several masks are mixed, so is the tile, although together they may hide all of it.
template <auto config, class Params>
__device__ void find_visible_tiles(const Params& params, uint8* visibility) {
  const TileMap<config> map(params);
  const int64 index = int64(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  if (index >= map.size()) return;
  const int first_col = int(index % map.cols) * config.block_n;
  const int first_row = int(index / map.cols % map.rows) * config.block_m;
  const int head = int(index / map.cols / map.rows % map.heads);
  const Sequence sequence = {int(index / map.cols / map.rows / map.heads)};
  const Range rows = {first_row, minimum(first_row + config.block_m, params.scores.map_rows)};
  const Range cols = {first_col, minimum(first_col + config.block_n, params.scores.map_cols)};

  const ElementMask<config> mask(params, sequence, head);
  TileState state = TileState::visible;
  if constexpr (config.block_mask) {
    state = scan(mask.blocks, blocks_of(rows, mask.block_rows), blocks_of(cols, mask.block_cols));
  }
#pragma unroll
  for (int m = 0; m < config.masks; ++m) {
    if (state == TileState::hidden) break;
    const TileState other = scan(mask.masks[m], rows, cols);
    if (other != TileState::visible) state = other;
  }
  if (threadIdx.x % 32 == 0) visibility[index] = static_cast<uint8>(state);
}

}  // namespace cupyflash
