// What the kernels' builtins need of the host: the threads of a block, and how they wait.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <string>

namespace emulator {

struct Index {
  unsigned x, y, z;
};

constexpr int warp_size = 32;
constexpr int slot_bytes = 64;  // the most that a lane hands to its warp at once

extern Index thread, block, block_size, grid_size;

inline int lane() { return int(thread.x) % warp_size; }
inline int warp() { return int(thread.x) / warp_size; }

/// Notes what went wrong: the launch ends, and Python raises an error that says what, and where.
void note_complaint(const char* what, std::initializer_list<long long> values);
[[noreturn]] void abandon();

/// Outside of threads.
template <class... Values>
void complain(const char* what, Values... values) {
  note_complaint(what, {static_cast<long long>(values)...});
}

/// In a thread, which ends here.
template <class... Values>
[[noreturn]] void fail(const char* what, Values... values) {
  complain(what, values...);
  abandon();
}

/// What a thread waits for, should it be for ever.
struct Reason {
  std::string (*describe)(long long, long long);
  long long first = 0, second = 0;
};

void begin_to_wait(Reason reason);
void let_others_run();
void note_progress();

/// Lets other threads run until `ready`.
template <class Ready>
void wait_until(Ready ready, Reason reason) {
  begin_to_wait(reason);
  while (!ready()) {
    let_others_run();
  }
  note_progress();
}

/// Lets all other warps run as far as they can: before something that is done as late as it may.
void step_aside();

/// __syncthreads, how many there have been, and __syncthreads_or.
void await_block();
unsigned block_phase();
int await_block_or(int value);

/// Shows `data` to the warp, waits for it, and returns the lanes' slots of `slot_bytes` each.
const unsigned char* exchange(const void* data, int bytes);

inline void await_warp() {
  const int nothing = 0;
  exchange(&nothing, sizeof(nothing));
}

template <class T>
T read_slot(const unsigned char* slots, int of_lane) {
  static_assert(sizeof(T) <= slot_bytes);
  T value;
  memcpy(&value, slots + of_lane * slot_bytes, sizeof(T));
  return value;
}

}  // namespace emulator
