// Registers to global memory by way of shared memory: the copy engine writes rows, while the warp
// goes on.
#pragma once

#include "arch/bulk.cuh"
#include "arch/pack.cuh"
#include "tile/fragment_mma.cuh"
#include "tile/panels.cuh"

namespace cupyflash {

/// A warp's place for `cols` 16-bit elements of 16 rows: a part of a tile of `tile_rows`.
template <int cols, int tile_rows>
struct RowStage {
  using Tile = PanelTile<tile_rows, cols>;

  unsigned address;  // of its rows in the tile, a multiple of 1024

  /// Rounds a warp's 16 rows, row r times factor[r], and writes them to rows `row` ... of a head,
  /// `cols` columns at a time. What the map's array does not have is left out.
  template <DataType dtype, int n_tiles>
  __device__ void write(const TensorMap& map, int row, int head, int batch,
                        const MmaFragment<1, n_tiles>& fragment, const float (&factor)[2]) const {
    constexpr int tiles = cols / 8;
    static_assert(n_tiles % tiles == 0 && (n_tiles == tiles || cols % Tile::panel_cols == 0));
    const Tile tile = {address};
    const auto staged = tile.row_writer(0);
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
        staged.write(words, j / 2);
      }
      publish_shared();
      __syncwarp();
      if (MmaLane::lane() == 0) tile.store(map, first * 8, row, head, batch);
    }
  }
  /// By whole warps: what was written before is no longer needed here.
  __device__ void finish() const {
    await_bulk_reads();
    __syncwarp();
  }
};

}  // namespace cupyflash
