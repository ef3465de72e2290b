// wgmma: products of a warpgroup, which go on while its threads do other things.
#pragma once

#include <cstdint>

namespace emulator {

enum class Format { half, bfloat16, e4m3 };

/// sum (64 x n) = a (64 x 32 bytes) * b (32 bytes x n), or += if `accumulate`.
struct Operation {
  Format format;
  int n;
  uint64_t a = 0;  // descriptor, unless a is in registers
  uint64_t b;      // descriptor
  bool a_in_registers = false;
  bool a_transposed = false;  // neighbours in memory run along the 64 rows, not along k
  bool b_transposed = false;  // and along the n columns
  bool accumulate;

  bool operator==(const Operation&) const = default;
};

/// wgmma.mma_async by one lane, which has `sum` (n / 2 floats) and `fragment` (4 words, or null).
/// The sum is NaN from here on, computed and written where a thread waits for it. That nobody
/// writes to it before is checked.
void start_product(const Operation& operation, float* sum, const unsigned* fragment);
/// wgmma.fence, commit_group and wait_group.
void fence_registers();
void commit_products();
void await_products(int pending_groups);

void start_products(int threads);
void end_products();

}  // namespace emulator
