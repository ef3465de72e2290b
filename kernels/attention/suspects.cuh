// NaN that Hopper's forward with a bias has met: where the bias is -inf, K and V may hold anything,
// and 0 * NaN is NaN. As long as no warp has met any, the kernel that does the call again does
// nothing.
#pragma once

#include "arch/opaque.cuh"
#include "attention/params.cuh"

namespace cupyflash {

/// A byte for each warp that computes, 1 if it has met NaN, in the place of the visibility map:
/// only calls with masks have that.
struct Suspects {
  uint8* own;  // this warp's

  /// `warp` counts through those of this block that compute, of which there are `warps`.
  __device__ Suspects(const ForwardParams& params, int warp, int warps)
      : own(params.visibility + opaque(int(blockIdx.x) * warps + warp)) {}

  /// By whole warps, before anything is added: nothing was there before.
  __device__ void clear() const { write(0); }
  /// By whole warps: some of its lanes may have met NaN.
  __device__ void add(bool met) const {
    if (__any_sync(0xffffffffu, met)) write(1);
  }

 private:
  /// By the same lane always, so that the last one stays.
  __device__ void write(uint8 value) const {
    if ((threadIdx.x & 31) == 0) *own = value;
  }
};

/// By a whole block of the kernel after: whether any warp of the one before has met NaN.
template <int threads>
__device__ bool any_suspect(const ForwardParams& params) {
  const auto* of_warpgroups = reinterpret_cast<const unsigned*>(params.visibility);
  unsigned met = 0;
  for (int i = threadIdx.x; i < params.scores.map_cols; i += threads) met |= of_warpgroups[i];
  return __syncthreads_or(int(met));
}

}  // namespace cupyflash
