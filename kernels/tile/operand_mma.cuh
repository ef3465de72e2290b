// Operands of mma.sync out of swizzled tiles: which 16 bytes each lane asks ldmatrix for.
#pragma once

#include "arch/ldmatrix.cuh"
#include "tile/swizzle.cuh"

namespace cupyflash {

/// A lane's place in a tile, for a walk along the columns: steps of 16 columns are an exclusive or
/// within the permuted chunks, and an addition, known at compile time, beyond them.
template <class Tile>
struct ColumnWalk {
  unsigned base;

  __device__ unsigned at(int step, int rows = 0) const {
    constexpr int steps = Tile::period / 2;
    return (base ^ ((step % steps) << 5)) + (step / steps) * (steps << 5) + rows * Tile::pitch;
  }
  /// The same walk `rows` further down, a multiple of 8.
  __device__ ColumnWalk down(int rows) const { return {base + rows * Tile::pitch}; }
};

/// A walk of `count` steps that starts at a multiple of `count` known at run time only.
template <class Tile, int count>
struct PartialWalk {
  static constexpr bool separable = (count & (count - 1)) == 0;
  ColumnWalk<Tile> walk;
  int first;

  __device__ PartialWalk(const ColumnWalk<Tile>& whole, int part)
      : walk(separable ? ColumnWalk<Tile>{whole.at(part * count)} : whole), first(part * count) {}

  __device__ unsigned at(int step, int rows = 0) const {
    return walk.at(separable ? step : first + step, rows);
  }
  __device__ PartialWalk down(int rows) const {
    PartialWalk moved = *this;
    moved.walk = walk.down(rows);
    return moved;
  }
};

/// How lanes address a tile for ldmatrix.
template <class Tile>
struct WalkOf {
  /// Rows 16 n ... of the tile by 16 columns: operand `a` as stored, or two `b` pieces transposed.
  __device__ static ColumnWalk<Tile> left(const Tile& tile, int first_row) {
    const int lane = threadIdx.x & 31;
    return {tile.chunk(first_row + (lane & 15), lane >> 4)};
  }
  /// Two `b` pieces as stored (columns of b are rows of the tile), or `a` transposed.
  __device__ static ColumnWalk<Tile> right(const Tile& tile, int first_row) {
    const int lane = threadIdx.x & 31;
    return {tile.chunk(first_row + (lane & 7) + ((lane >> 4) << 3), lane >> 3 & 1)};
  }
};

}  // namespace cupyflash
