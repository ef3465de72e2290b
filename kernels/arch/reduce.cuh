// red: addition in global memory without an answer; and counters by which blocks take turns.
#pragma once

namespace cupyflash {

/// target[0] += first, target[1] += second, each atomically; target is a multiple of 8 bytes.
__device__ inline void reduce_add(float* target, float first, float second) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(target), "f"(first),
               "f"(second)
               : "memory");
#else
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(target), "f"(first) : "memory");
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(target + 1), "f"(second)
               : "memory");
#endif
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
