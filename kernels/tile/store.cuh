// Registers to global memory: the lane's part of a row, converted to the storage type.
#pragma once

#include "tile/lanes.cuh"
#include "tile/load.cuh"

namespace cupyflash {

/// Writes `sums[i] * factor` of one row, in the column order of accumulate_product.
template <int width, class Element, class T, int cols>
__device__ void store_row(const GlobalRows<Element>& target, int row, const T (&sums)[cols],
                          T factor) {
  constexpr int step = widest<T>;
  static_assert(step % width == 0);
#pragma unroll
  for (int c = 0; c < cols; c += width) {
    const int col = (c / step) * (LaneGrid::cols * step) + LaneGrid::col() * step + c % step;
    if (col >= target.dim) continue;
    Vector<Element, width> converted;
#pragma unroll
    for (int w = 0; w < width; ++w) converted[w] = from_accumulator<Element>(sums[c + w] * factor);
    *reinterpret_cast<Vector<Element, width>*>(target.row(row) + col) = converted;
  }
}

}  // namespace cupyflash
