// Work that is cut into units and written between the slices of a product, which hides it.
#pragma once

#include "common/math.cuh"

namespace cupyflash {

/// `count` units beside `slices` slices, the first one at once.
template <int count, int slices>
struct Spread {
  /// Units that are written before slice k.
  __device__ static constexpr int begun(int k) {
    return k <= 0 ? 0 : minimum(ceil_div(count * k, slices), count);
  }
  /// Units that slice k is to wait for if it is the first one that does, else 0.
  __device__ static constexpr int awaited(int k) { return ready(k) > ready(k - 1) ? ready(k) : 0; }

 private:
  /// A slice has passed since they were begun.
  __device__ static constexpr int ready(int k) {
    return minimum(begun(k - 1), count * (k + 1) / slices);
  }
};

}  // namespace cupyflash
