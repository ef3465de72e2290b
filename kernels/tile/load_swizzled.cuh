// Global to swizzled shared memory, without conversion.
#pragma once

#include "arch/copy_async.cuh"
#include "tile/load.cuh"
#include "tile/swizzle.cuh"

namespace cupyflash {

/// Copies a chunk of 16 bytes, of whose elements `columns` exist; the others become 0, or all if
/// not `inside`.
template <int width, class Element>
__device__ inline void copy_chunk(unsigned target, const Element* source, bool inside,
                                  int columns) {
  constexpr int size = sizeof(Element);
#pragma unroll
  for (int e = 0; e < 16 / size; e += width) {
    const bool exists = inside && e < columns;
    if constexpr (width == 1) {
      store_shared(target + e * size, exists ? source[e].bits : decltype(source[e].bits)(0));
    } else {
      copy_async_to<width * size>(target + e * size, source + e, exists);
    }
  }
}

/// Loads tiles of one matrix. A thread keeps to its columns and goes down the rows by multiples of
/// eight, so that the permutation of its chunks never changes.
/// `width` elements move at a time; dim, strides and addresses are multiples of it.
template <class Tile, int threads, int width, class Element>
struct SwizzledLoader {
  static constexpr int whole = Tile::chunks & -Tile::chunks;
  static constexpr int lanes = whole < threads / 8 ? whole : threads / 8;  // threads of a row
  static constexpr int chunks_per_lane = Tile::chunks / lanes;
  static constexpr int rows_per_pass = threads / lanes;
  static constexpr int passes = (Tile::rows + rows_per_pass - 1) / rows_per_pass;
  static_assert(rows_per_pass % 8 == 0 && lanes % Tile::period == 0);

  GlobalRows<const Element> rows;

  /// Fills `tile` with rows first_row, first_row + 1, ...; those outside `valid`, and columns that
  /// do not exist, become 0 and are not read.
  __device__ void load(const Tile& tile, int first_row, Range valid) const {
    const int thread = threadIdx.x;
    const int lane_row = thread / lanes;
    const int lane_chunk = thread % lanes;
    const Element* source = rows.row(first_row + lane_row) + lane_chunk * 8;
    const unsigned target = tile.chunk(lane_row, lane_chunk);
    // One unsigned comparison a row.
    const int count = valid.end > valid.begin ? valid.end - valid.begin : 0;
    const int row = first_row + lane_row - valid.begin;
#pragma unroll
    for (int pass = 0; pass < passes; ++pass) {
      if (Tile::rows % rows_per_pass != 0 && lane_row + pass * rows_per_pass >= Tile::rows) break;
      const bool inside = unsigned(row + pass * rows_per_pass) < unsigned(count);
#pragma unroll
      for (int c = 0; c < chunks_per_lane; ++c) {
        copy_chunk<width>(target + pass * rows_per_pass * Tile::pitch + c * lanes * 16,
                          source + c * lanes * 8, inside, rows.dim - (lane_chunk + c * lanes) * 8);
      }
      source += rows_per_pass * rows.row_stride;
    }
  }
};

}  // namespace cupyflash
