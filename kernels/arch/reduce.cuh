// red: addition in global memory without an answer; and counters by which blocks take turns.
#pragma once

namespace cupyflash {

/// target += value, four numbers, each atomically; target is a multiple of 16 bytes.
__device__ inline void reduce_add(float* target, float4 value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target),
               "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
               : "memory");
#else
  const float values[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(target + e), "f"(values[e])
                 : "memory");
  }
#endif
}

/// target += value, atomically.
__device__ inline void reduce_add(float* target, float value) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(target), "f"(value) : "memory");
}

/// target = value, four numbers in one instruction: the compiler would write them one by one.
__device__ inline void store_sums(float* target, float4 value) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target), "f"(value.x), "f"(value.y),
               "f"(value.z), "f"(value.w)
               : "memory");
}
/// Four numbers, with all that this thread has added to them.
__device__ inline float4 load_sums(const float* source) {
  float4 value;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "l"(source)
               : "memory");
  return value;
}

/// Waits until the counter is `turn`; what other blocks wrote before they advanced it is visible.
__device__ inline void await_turn(const int* counter, int turn) {
  int now;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  } while (now != turn);
}

/// Gives the next block its turn.
__device__ inline void end_turn(int* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

}  // namespace cupyflash
