// Host version of kernels/arch/reduce.cuh: blocks run one after another.
#pragma once

namespace cupyflash {

inline void reduce_add(float* target, float value) { *target += value; }

inline void reduce_add(float* target, float4 value) {
  if (reinterpret_cast<uintptr_t>(target) % sizeof(float4) != 0) {
    emulator::fail("misaligned red.v4 of (block, thread)", blockIdx.x, threadIdx.x);
  }
  const float values[4] = {value.x, value.y, value.z, value.w};
  for (int e = 0; e < 4; ++e) {
    target[e] += values[e];
  }
}

inline void store_sums(float* target, float4 value) { *reinterpret_cast<float4*>(target) = value; }

inline float4 load_sums(const float* source) {
  return make_float4(source[0], source[1], source[2], source[3]);
}

/// Whose turn has not come would wait for a block that starts later: on a GPU, perhaps for ever.
inline void await_turn(const int* counter, int turn) {
  if (*counter != turn) {
    emulator::fail("a turn that has not come, (turn, counter)", turn, *counter);
  }
}

inline void end_turn(int* counter) { ++*counter; }

}  // namespace cupyflash
