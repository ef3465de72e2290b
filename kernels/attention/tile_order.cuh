// The order in which thread blocks take tiles, where locate_tile's own would spread them over more
// heads than the L2 cache holds.
#pragma once

#include "attention/sequence.cuh"

namespace cupyflash {

/// With a window, locate_tile starts all heads' longest tiles first. Taken so for a few heads at a
/// time, the heads' keys and values stay in the cache while their tiles pass.
///
/// index counts groups of `heads` (head, batch) pairs, within them tiles, within them pairs;
/// the result is what locate_tile counts: tiles, within them all pairs.
__device__ inline int grouped_order(int index, int tiles, int pairs, int heads) {
  const int group = index / (heads * tiles);
  const int first = group * heads;
  const int size = minimum(heads, pairs - first);
  const int rest = index - first * tiles;
  return rest / size * pairs + first + rest % size;
}

/// Heads whose rows of `dim` 16-bit elements, `rows` of them, fill about half of an L2 cache; 0:
/// not even one does.
__device__ inline int heads_in_half_cache(int rows, int dim) {
  constexpr int elements = 8 << 20;
  return elements / dim / maximum(1, rows);
}
/// The same, at least one.
__device__ inline int heads_in_cache(int rows, int dim) {
  return maximum(1, heads_in_half_cache(rows, dim));
}

}  // namespace cupyflash
