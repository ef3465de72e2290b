// A main loop's way over its tiles: all of a range, or those that a map does not hide.
#pragma once

#include "attention/visible_tiles.cuh"

namespace cupyflash {

/// The tile at hand and `ahead` more. Tiles take turns in two buffers: `slot` counts them.
template <bool given, int ahead>
class TileWalk {
 public:
  __device__ TileWalk(const TileStates<given>& states, Range tiles)
      : states_(states), end_(tiles.end), slot_(tiles.begin) {
    if constexpr (given) {
      fetch(tiles.begin);
#pragma unroll
      for (int k = 0; k <= ahead; ++k) tiles_[k] = find(mixed_[k]);
    }
  }

  __device__ int slot() const { return slot_; }
  /// The k-th tile from here.
  __device__ int tile(int k) const { return given ? tiles_[k] : slot_ + k; }
  /// The same, given tile(0).
  __device__ int ahead_of(int, int k) const { return tile(k); }
  __device__ bool exists(int k) const { return tile(k) < end_; }
  /// The same where the tile before it exists.
  __device__ bool ends(int k) const { return given ? tile(k) >= end_ : tile(k) == end_; }
  /// Whether some of the tile's elements are hidden.
  __device__ bool mixed(int k) const { return given && mixed_[k]; }

  __device__ void advance() {
    ++slot_;
    if constexpr (given) {
#pragma unroll
      for (int k = 0; k < ahead; ++k) {
        tiles_[k] = tiles_[k + 1];
        mixed_[k] = mixed_[k + 1];
      }
      tiles_[ahead] = find(mixed_[ahead]);
    }
  }

 private:
  TileStates<given> states_;
  int end_;
  int slot_;
  int tiles_[ahead + 1];
  bool mixed_[ahead + 1];
  // States of 32 tiles from `first_` on, a bit each: those to come that are not hidden, and mixed.
  int first_;
  unsigned left_;
  unsigned mixed_bits_;

  /// By whole warps, as is all that follows.
  __device__ void fetch(int first) {
    const int mine = first + int(threadIdx.x & 31);
    const TileState state = mine < end_ ? states_.at(mine) : TileState::hidden;
    first_ = first;
    left_ = __ballot_sync(0xffffffffu, state != TileState::hidden);
    mixed_bits_ = __ballot_sync(0xffffffffu, state == TileState::mixed);
  }

  /// The next tile that is not hidden, or the end.
  __device__ int find(bool& mixed) {
    while (left_ == 0) {
      mixed = false;
      if (first_ + 32 >= end_) return end_;
      fetch(first_ + 32);
    }
    const int bit = __ffs(left_) - 1;
    left_ &= left_ - 1;
    mixed = mixed_bits_ >> bit & 1;
    return first_ + bit;
  }
};

/// Without a map.
template <int ahead>
class TileWalk<false, ahead> {
 public:
  __device__ TileWalk(const TileStates<false>&, Range tiles)
      : tile_(tiles.begin), end_(tiles.end) {}

  __device__ int slot() const { return tile_; }
  __device__ int tile(int k) const { return tile_ + k; }
  __device__ int ahead_of(int tile, int k) const { return tile + k; }
  __device__ bool exists(int k) const { return tile_ + k < end_; }
  __device__ bool ends(int k) const { return tile_ + k == end_; }
  __device__ bool mixed(int) const { return false; }
  __device__ void advance() { ++tile_; }

 private:
  int tile_;
  int end_;
};

}  // namespace cupyflash
