// Global to shared memory: rows of a (seqlen, head_dim) matrix, converted to the accumulator type.
#pragma once

#include "arch/convert.cuh"
#include "arch/copy_async.cuh"
#include "tile/shared_tile.cuh"

namespace cupyflash {

/// The rows of one head of one sequence in global memory.
template <class Element>
struct GlobalRows {
  Element* first;    // row 0
  int64 row_stride;  // in elements; may be 0 or negative
  int dim;           // columns that exist

  __device__ Element* row(int index) const { return first + index * row_stride; }
};

template <int width, class Element, class T>
__device__ inline void store_converted(T* shared, const Vector<Element, width>& source) {
  constexpr int step = width < widest<T> ? width : widest<T>;
#pragma unroll
  for (int base = 0; base < width; base += step) {
    Vector<T, step> converted;
#pragma unroll
    for (int c = 0; c < step; ++c) converted[c] = to_accumulator(source[base + c]);
    *reinterpret_cast<Vector<T, step>*>(shared + base) = converted;
  }
}

/// How `threads` threads share the vectors of a tile: each keeps to its columns and goes down the
/// rows, so that an address is one addition away from the last.
template <int threads, int rows, int vectors>
struct LoadShape {
  // Threads of a row: the largest power of two that divides both.
  static constexpr int lanes = (vectors | threads) & -(vectors | threads);
  static constexpr int vectors_per_lane = vectors / lanes;
  static constexpr int rows_per_pass = threads / lanes;
  static constexpr int passes = (rows + rows_per_pass - 1) / rows_per_pass;
  static constexpr bool ragged = rows % rows_per_pass != 0;
  // Passes whose loads are under way together.
  static constexpr int group = passes % 4 == 0 && vectors_per_lane == 1   ? 4
                               : passes % 2 == 0 && vectors_per_lane <= 2 ? 2
                                                                          : 1;
};

/// Fills `tile` with rows first_row, first_row + 1, ...; those outside `valid`, and columns that
/// do not exist, become 0 and are not read. `width` elements move at a time; dim, strides and
/// addresses are multiples of it. Asynchronous copies end with copy_async_wait and a barrier, the
/// others with a barrier.
template <int threads, int width, bool async, class Tile, class Element>
__device__ void load_tile(Tile& tile, const GlobalRows<const Element>& source, int first_row,
                          Range valid) {
  using Shape = LoadShape<threads, Tile::rows, Tile::cols / width>;
  using Source = Vector<Element, width>;
  constexpr int col_step = Shape::lanes * width;
  const int lane_row = int(threadIdx.x) / Shape::lanes;
  const int lane_col = int(threadIdx.x) % Shape::lanes * width;
  const Element* address = source.row(first_row + lane_row) + lane_col;
  typename Tile::Value* target = tile.row(lane_row) + lane_col;

#pragma unroll 1
  for (int first_pass = 0; first_pass < Shape::passes; first_pass += Shape::group) {
    Source staged[Shape::group][Shape::vectors_per_lane];
#pragma unroll
    for (int pass = 0; pass < Shape::group; ++pass) {
      const int row = lane_row + (first_pass + pass) * Shape::rows_per_pass;
      const bool row_inside = valid.contains(first_row + row);
      if (Shape::ragged && row >= Tile::rows) break;
#pragma unroll
      for (int v = 0; v < Shape::vectors_per_lane; ++v) {
        const bool inside = row_inside && lane_col + v * col_step < source.dim;
        if constexpr (async) {
          copy_async<width * sizeof(Element)>(
              target + pass * Shape::rows_per_pass * Tile::stride + v * col_step,
              address + v * col_step, inside);
        } else {
          staged[pass][v] =
              inside ? *reinterpret_cast<const Source*>(address + v * col_step) : Source{};
        }
      }
      address += Shape::rows_per_pass * source.row_stride;
    }
    if constexpr (!async) {
#pragma unroll
      for (int pass = 0; pass < Shape::group; ++pass) {
        const int row = lane_row + (first_pass + pass) * Shape::rows_per_pass;
        if (Shape::ragged && row >= Tile::rows) break;
#pragma unroll
        for (int v = 0; v < Shape::vectors_per_lane; ++v) {
          store_converted<width>(target + pass * Shape::rows_per_pass * Tile::stride + v * col_step,
                                 staged[pass][v]);
        }
      }
    }
    target += Shape::group * Shape::rows_per_pass * Tile::stride;
  }
}

}  // namespace cupyflash
