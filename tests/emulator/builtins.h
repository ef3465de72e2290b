// CUDA's keywords and builtins for a host compiler; comes before everything else.
#pragma once

#include "formats.h"
#include "runtime.h"
#include "shared.h"

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
// All threads of a block are fibers of one thread of the host. Unlike `static`, this goes with
// `extern`.
#define __shared__ thread_local
#define __CUDA_ARCH__ 900
#undef INFINITY
#undef NAN

#define threadIdx emulator::thread
#define blockIdx emulator::block
#define blockDim emulator::block_size
#define gridDim emulator::grid_size

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// --- warps: every mask is full, as in all of our kernels -----------------------------------------

inline void __syncthreads() { emulator::await_block(); }
inline int __syncthreads_or(int value) { return emulator::await_block_or(value); }

inline void __syncwarp() { emulator::await_warp(); }

template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  const unsigned char* slots = emulator::exchange(&value, sizeof(T));
  return emulator::read_slot<T>(slots, lane % emulator::warp_size);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  return __shfl_sync(mask, value, emulator::lane() ^ lanes);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, int lanes) {
  const int lane = emulator::lane() + lanes;
  return __shfl_sync(mask, value, lane < emulator::warp_size ? lane : emulator::lane());
}

inline unsigned __ballot_sync(unsigned, bool vote) {
  const unsigned char* slots = emulator::exchange(&vote, sizeof(vote));
  unsigned votes = 0;
  for (int lane = 0; lane < emulator::warp_size; ++lane) {
    votes |= unsigned(emulator::read_slot<bool>(slots, lane)) << lane;
  }
  return votes;
}

inline int __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
inline int __all_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) == 0xffffffffu; }

inline unsigned __reduce_or_sync(unsigned, unsigned value) {
  const unsigned char* slots = emulator::exchange(&value, sizeof(value));
  unsigned result = 0;
  for (int lane = 0; lane < emulator::warp_size; ++lane) {
    result |= emulator::read_slot<unsigned>(slots, lane);
  }
  return result;
}

template <class T>
unsigned __match_any_sync(unsigned, T value) {
  const unsigned char* slots = emulator::exchange(&value, sizeof(T));
  unsigned alike = 0;
  for (int lane = 0; lane < emulator::warp_size; ++lane) {
    const T other = emulator::read_slot<T>(slots, lane);
    alike |= unsigned(memcmp(&other, &value, sizeof(T)) == 0) << lane;
  }
  return alike;
}

template <class T>
unsigned __match_all_sync(unsigned mask, T value, int* all_alike) {
  *all_alike = __match_any_sync(mask, value) == 0xffffffffu;
  return *all_alike ? 0xffffffffu : 0;
}

// Threads change only where they wait: each addition is whole.
template <class T>
T atomicAdd(T* target, T value) {
  const T before = *target;
  *target = before + value;
  return before;
}

// --- scalars -------------------------------------------------------------------------------------

template <class To, class From>
To emulator_bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
}

inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __clz(int bits) { return bits ? __builtin_clz(bits) : 32; }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((uint64_t(a) * b) >> 32); }
inline int __vimax3_s32(int a, int b, int c) {
  const int larger = a > b ? a : b;
  return larger > c ? larger : c;
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned places) {
  const uint64_t bytes = uint64_t(high) << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= unsigned(bytes >> (places >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  }
  return result;
}
inline float __uint_as_float(unsigned bits) { return emulator_bit_cast<float>(bits); }
inline unsigned __float_as_uint(float value) { return emulator_bit_cast<unsigned>(value); }
inline float __int_as_float(int bits) { return emulator_bit_cast<float>(bits); }
inline int __float_as_int(float value) { return emulator_bit_cast<int>(value); }
inline long long __double_as_longlong(double value) { return emulator_bit_cast<long long>(value); }
inline double __longlong_as_double(long long bits) { return emulator_bit_cast<double>(bits); }
inline unsigned __cvta_generic_to_shared(const void* pointer) {
  return emulator::address_of_shared(pointer);
}
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline float rsqrt(float x) { return rsqrtf(x); }
inline double rsqrt(double x) { return 1 / std::sqrt(x); }
using std::abs;
using std::copysign;
using std::fabs;
