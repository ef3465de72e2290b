// Forward on tensor cores, of a call whose bias Hopper's forward has served already: again if that
// has met NaN, which K and V that the bias or the band hides may have brought.
#pragma once

#include "attention/suspects.cuh"
#include "forward/kernel_mma.cuh"

namespace cupyflash {

template <MmaForwardConfig config>
__device__ void forward_again_mma(const ForwardParams& params) {
  if (any_suspect<config.threads()>(params)) forward_mma<config>(params);
}

}  // namespace cupyflash
