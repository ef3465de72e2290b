// Tiles of short elements in shared memory, laid out for wgmma and the copy engine.
#pragma once

#include "arch/ldmatrix.cuh"
#include "arch/opaque.cuh"
#include "arch/stmatrix.cuh"
#include "arch/tma.cuh"
#include "arch/wgmma.cuh"
#include "tile/swizzle.cuh"

namespace cupyflash {

/// `rows` x `cols` elements of `itemsize` bytes as panels of 128 bytes a row, one after the other.
/// A panel is a SwizzledTile of 16-bit columns, whatever the elements are.
template <int rows_, int cols_, int itemsize = 2>
struct PanelTile {
  static constexpr int rows = rows_;
  static constexpr int cols = cols_;
  static constexpr int panel_cols = 128 / itemsize;
  static constexpr int panels = (cols + panel_cols - 1) / panel_cols;
  using Panel = SwizzledTile<rows, 64>;
  static constexpr int bytes = panels * Panel::bytes;
  static_assert(rows % 8 == 0 && rows <= 256);

  unsigned address;  // a multiple of 1024

  __device__ Panel panel(int index) const { return {address + index * Panel::bytes}; }

  /// By one thread: fills the tile from `row` on; all of its bytes count on `arrived`.
  __device__ void load(const TensorMap& map, int row, int head, int batch,
                       AsyncBarrier arrived) const {
    load(map, 0, row, head, batch, arrived);
  }
  /// The same from column `col` on, a multiple of 16 bytes.
  __device__ void load(const TensorMap& map, int col, int row, int head, int batch,
                       AsyncBarrier arrived) const {
    arrived.arrive_and_expect(bytes);
    copy(map, row, head, batch, arrived, col);
  }
  /// The same for a barrier that expects them already.
  __device__ void copy(const TensorMap& map, int row, int head, int batch, AsyncBarrier arrived,
                       int col = 0) const {
#pragma unroll
    for (int p = 0; p < panels; ++p) {
      copy_box(panel(p).address, map, col + p * panel_cols, row, head, batch, arrived);
    }
  }
  /// By one thread: writes columns `col` ... of an array from the tile's first rows, those of a
  /// box.
  __device__ void store(const TensorMap& map, int col, int row, int head, int batch) const {
#pragma unroll
    for (int p = 0; p < panels; ++p) {
      store_box(map, panel(p).address, col + p * panel_cols, row, head, batch);
    }
  }
  /// Operand of products: rows from `row` on, a multiple of 8.
  __device__ uint64 operand(int row = 0) const {
    return describe_operand(address + row * Panel::pitch, Panel::bytes);
  }
  /// Operand by rows: columns from 64 * index on.
  __device__ uint64 columns(int index) const {
    return describe_operand(panel(index).address, Panel::bytes);
  }
  /// Address of the 16 bytes number `index` of a row.
  __device__ unsigned chunk(int row, int index) const {
    return panel(index >> 3).chunk(row, index & 7);
  }
  /// From an operand's column 0 to its 32 bytes number `step`.
  __device__ static constexpr int column_bytes(int step) {
    return step / 4 * Panel::bytes + step % 4 * 32;
  }
  /// From an operand's row 0 to its rows 16 * step.
  __device__ static constexpr int row_bytes(int step) { return step * 16 * Panel::pitch; }

  /// A warp's 16 rows from `row` on, 32 bytes number `step`, as a register operand.
  __device__ void read(unsigned (&fragment)[4], int row, int step) const {
    const int lane = threadIdx.x & 31;
    load_matrices(fragment, panel(step / 4).chunk(row + (lane & 15), step % 4 * 2 + (lane >> 4)));
  }
  /// The same of all steps, one after the other: of their addresses one is kept in a register.
  struct RowReader {
    unsigned start;

    __device__ void read(unsigned (&fragment)[4], int step) const {
      load_matrices(fragment, (start ^ (step % 4 << 5)) + step / 4 * Panel::bytes);
    }
  };
  __device__ RowReader row_reader(int row) const { return {row_writer(row).start}; }
  /// The opposite.
  struct RowWriter {
    unsigned start;

    __device__ void write(const unsigned (&fragment)[4], int step) const {
      store_matrices((start ^ (step % 4 << 5)) + step / 4 * Panel::bytes, fragment);
    }
  };
  __device__ RowWriter row_writer(int row) const {
    const int lane = threadIdx.x & 31;
    return {opaque(panel(0).chunk(row + (lane & 15), lane >> 4))};
  }
  /// The same of one step.
  __device__ void write(const unsigned (&fragment)[4], int row, int step) const {
    const int lane = threadIdx.x & 31;
    store_matrices(panel(step / 4).chunk(row + (lane & 15), step % 4 * 2 + (lane >> 4)), fragment);
  }
};

}  // namespace cupyflash
