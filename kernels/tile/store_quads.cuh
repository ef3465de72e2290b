// Registers to global memory, 16 bytes a lane: four lanes exchange what they have of a row.
#pragma once

#include "arch/pack.cuh"
#include "tile/fragment_mma.cuh"
#include "tile/load.cuh"

namespace cupyflash {

/// Lane q of a quad gets word q of each of its four lanes.
__device__ inline void transpose_quad(unsigned (&words)[4]) {
  const int lane = threadIdx.x & 3;
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const bool upper = lane & bit;
      const unsigned received =
          __shfl_xor_sync(0xffffffffu, upper ? words[i] : words[i | bit], bit);
      if (upper) {
        words[i] = received;
      } else {
        words[i | bit] = received;
      }
    }
  }
}

/// Rounds a warp's 16 rows, row r times factor[r], and writes them to rows first_row ... of
/// `target`, those below `limit`.
template <DataType dtype, int width, int n_tiles>
__device__ void write_rows(const GlobalRows<Element<dtype>>& target, int first_row, int limit,
                           const MmaFragment<1, n_tiles>& fragment, const float (&factor)[2]) {
  static_assert(n_tiles % 4 == 0);
  using Part = Vector<Element<dtype>, width>;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + r * 8 + MmaLane::row();
    const bool inside = row < limit;
    Element<dtype>* const address = target.row(row);
#pragma unroll
    for (int j = 0; j < n_tiles; j += 4) {
      unsigned words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = &fragment.at[0][j + i][2 * r];
        words[i] = pack_pair<dtype>(pair[0] * factor[r], pair[1] * factor[r]);
      }
      transpose_quad(words);
      const int col = (j + (MmaLane::lane() & 3)) * 8;
      const uint4 eight = make_uint4(words[0], words[1], words[2], words[3]);
      if constexpr (width == 8) {
        if (inside && col < target.dim) *reinterpret_cast<uint4*>(address + col) = eight;
      } else {
        const auto parts = __builtin_bit_cast(Vector<Part, 8 / width>, eight);
#pragma unroll
        for (int p = 0; p < 8 / width; ++p) {
          if (inside && col + p * width < target.dim) {
            *reinterpret_cast<Part*>(address + col + p * width) = parts.data[p];
          }
        }
      }
    }
  }
}

}  // namespace cupyflash
