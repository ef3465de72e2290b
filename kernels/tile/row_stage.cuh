// Registers to global memory by way of shared memory: the copy engine writes rows, while the warp
// goes on.
#pragma once

#include "arch/bulk.cuh"
#include "arch/pack.cuh"
#include "arch/stmatrix.cuh"
#include "tile/fragment_mma.cuh"
#include "tile/load.cuh"

namespace cupyflash {

/// A warp's place for `cols` 16-bit elements of 16 rows.
template <int cols>
struct RowStage {
  static constexpr int rows = 16;
  static constexpr int pitch = 2 * cols + 16;  // neighbouring rows lie in other banks
  static constexpr int bytes = rows * pitch;

  unsigned address;  // a multiple of 16

  /// As write_rows, `cols` columns at a time; rows of `target` are multiples of 16 bytes.
  template <DataType dtype, int n_tiles>
  __device__ void write(const GlobalRows<Element<dtype>>& target, int first_row, int limit,
                        const MmaFragment<1, n_tiles>& fragment, const float (&factor)[2]) const {
    constexpr int tiles = cols / 8;
    static_assert(n_tiles % tiles == 0);
    const int lane = MmaLane::lane();
    const unsigned mine = address + (lane & 15) * pitch + (lane >> 4) * 16;
    const int row = first_row + lane;
    const bool exists = lane < rows && row < limit;
#pragma unroll
    for (int first = 0; first < n_tiles; first += tiles) {
      finish();
#pragma unroll
      for (int j = 0; j < tiles; j += 2) {
        unsigned words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* pair = &fragment.at[0][first + j + i / 2][i % 2 * 2];
          words[i] = pack_pair<dtype>(pair[0] * factor[i % 2], pair[1] * factor[i % 2]);
        }
        store_matrices(mine + j * 16, words);
      }
      publish_shared();
      __syncwarp();
      const int count = minimum(cols, target.dim - first * 8);
      if (exists && count > 0) {
        store_bulk(target.row(row) + first * 8, address + lane * pitch, 2 * count);
      }
    }
  }
  /// By whole warps: what was written before is no longer needed here.
  __device__ void finish() const {
    await_bulk_reads();
    __syncwarp();
  }
};

}  // namespace cupyflash
