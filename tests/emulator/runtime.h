// What the kernels' builtins need of the host: the threads of a block, and their memory.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emulator {

struct Index {
  unsigned x, y, z;
};

constexpr int warp_size = 32;
constexpr int slot_bytes = 64;  // the most that a lane hands to its warp at once

extern Index thread, block, block_size, grid_size;
extern unsigned shared_bytes;  // of the block that runs

inline int lane() { return int(thread.x) % warp_size; }

/// __syncthreads.
void await_block();

/// __syncthreads_or.
int await_block_or(int value);

/// Shows `data` to the warp, waits for it, and returns the lanes' slots of `slot_bytes` each.
const unsigned char* exchange(const void* data, int bytes);

template <class T>
T read_slot(const unsigned char* slots, int of_lane) {
  static_assert(sizeof(T) <= slot_bytes);
  T value;
  memcpy(&value, slots + of_lane * slot_bytes, sizeof(T));
  return value;
}

/// The block's dynamic shared memory at a 32-bit address; ends the program if an access is outside
/// or misaligned.
unsigned char* shared_at(unsigned address, unsigned bytes);
unsigned address_of_shared(const void* pointer);

/// cp.async: the copies land when they are waited for and no sooner.
void copy_later(unsigned shared, const void* global, int bytes, bool inside);
void commit_copies();
void await_copies(int pending_groups);

/// Ends the program, since no exception can cross from a kernel into Python.
[[noreturn]] void fail(const char* what, long long first, long long second);

inline float from_half(unsigned short bits) {
  _Float16 value;
  memcpy(&value, &bits, sizeof(value));
  return float(value);
}

inline unsigned short to_half(float value) {
  const _Float16 rounded = _Float16(value);
  unsigned short bits;
  memcpy(&bits, &rounded, sizeof(bits));
  return bits;
}

inline float from_bfloat16(unsigned short bits) {
  const unsigned word = unsigned(bits) << 16;
  float value;
  memcpy(&value, &word, sizeof(value));
  return value;
}

inline unsigned short to_bfloat16(float value) {
  unsigned bits;
  memcpy(&bits, &value, sizeof(bits));
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return 0x7fff;
  }
  return static_cast<unsigned short>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace emulator
