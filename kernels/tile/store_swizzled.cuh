// Registers to global memory by way of shared memory: a lane has pairs, memory wants 16 bytes.
#pragma once

#include "arch/pack.cuh"
#include "tile/fragment_mma.cuh"
#include "tile/load.cuh"
#include "tile/swizzle.cuh"

namespace cupyflash {

/// Rounds a warp's fragment, row (i, r) times factor[i][r], into rows first_row ..., columns
/// first_col ... of `tile`.
template <DataType dtype, class Tile, int m_tiles, int n_tiles>
__device__ void stage_rows(const Tile& tile, int first_row,
                           const MmaFragment<m_tiles, n_tiles>& fragment,
                           const float (&factor)[m_tiles][2], int first_col = 0) {
#pragma unroll
  for (int i = 0; i < m_tiles; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int j = 0; j < n_tiles; ++j) {
        const unsigned pair = pack_pair<dtype>(fragment.at[i][j][2 * r] * factor[i][r],
                                               fragment.at[i][j][2 * r + 1] * factor[i][r]);
        store_shared(tile.pair(first_row + i * 16 + r * 8 + MmaLane::row(),
                               first_col + j * 8 + MmaLane::col()),
                     pair);
      }
    }
  }
}

/// Writes `rows` staged rows of a warp to rows first_target ... of `target`, those below `limit`.
template <int rows, int width, class Tile, class Element>
__device__ void write_staged_rows(const GlobalRows<Element>& target, int first_target, int limit,
                                  const Tile& tile, int first_row) {
  __syncwarp();
#pragma unroll
  for (int base = 0; base < rows * Tile::chunks; base += 32) {
    const int index = base + MmaLane::lane();
    const int row = index / Tile::chunks;
    const int chunk = index % Tile::chunks;
    if (rows * Tile::chunks % 32 != 0 && row >= rows) break;
    if (first_target + row >= limit) continue;
    const uint4 staged = load_shared(tile.chunk(first_row + row, chunk));
    using Part = Vector<Element, width>;
    const auto parts = __builtin_bit_cast(Vector<Part, 8 / width>, staged);
    Element* address = target.row(first_target + row) + chunk * 8;
#pragma unroll
    for (int p = 0; p < 8 / width; ++p) {
      if (chunk * 8 + p * width < target.dim) {
        *reinterpret_cast<Part*>(address + p * width) = parts.data[p];
      }
    }
  }
}

}  // namespace cupyflash
