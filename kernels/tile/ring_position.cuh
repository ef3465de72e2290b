// A place in a ring of buffers in shared memory.
#pragma once

namespace cupyflash {

/// Counts through the stages of a ring of buffers.
template <int stages>
struct RingPosition {
  int stage = 0;
  unsigned round = 0;  // modulo 2

  /// The place after `count` steps: one number can then lead through several rings.
  __device__ static RingPosition after(unsigned count) {
    return {int(count % stages), count / stages & 1};
  }

  __device__ void advance() {
    if (++stage == stages) {
      stage = 0;
      round ^= 1;
    }
  }
};

}  // namespace cupyflash
