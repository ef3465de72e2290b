// In which blocks of a cache the keys of a step stand: the page table is asked ahead of the copies,
// as an answer takes long when these fill the way to memory.
#pragma once

#include "attention/cache_entry.cuh"
#include "attention/config_decode.cuh"

namespace cupyflash {

/// For each of a thread's rows, a step ahead.
template <DecodeConfig config, int rows, int rows_apart>
class RowNumbers {
 public:
  using Blocks = CacheBlocks<config.page_size>;

  /// Asks for the first step's, of keys first_key ...; `row` is the thread's first one.
  __device__ void start(const Blocks& blocks, Range valid, int first_key, int row) {
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      const int position = first_key + row + i * rows_apart;
      numbers_[i] = valid.contains(position) ? blocks.number_at(position) : 0;
    }
  }
  /// Asks for the next one's.
  __device__ void advance(const Blocks& blocks, Range valid, int first_key, int row) {
    start(blocks, valid, first_key, row);
  }
  /// By whole warps, before a step's numbers are read.
  __device__ void take() {}

  __device__ int of_row(int i) const { return numbers_[i]; }

 private:
  int numbers_[rows];
};

/// Where a page holds all keys of a step: each lane asks for a step of its own, 32 steps ahead.
template <DecodeConfig config>
class StepNumbers {
 public:
  using Blocks = CacheBlocks<config.page_size>;

  __device__ void start(const Blocks& blocks, Range valid, int first_key, int) {
    place_ = 0;
    numbers_ = ask(blocks, valid, first_key);
    later_ = ask(blocks, valid, first_key + lanes * config.keys());
  }
  __device__ void advance(const Blocks& blocks, Range valid, int first_key, int) {
    if (++place_ < lanes) return;
    place_ = 0;
    numbers_ = later_;
    later_ = ask(blocks, valid, first_key + lanes * config.keys());
  }
  __device__ void take() { number_ = __shfl_sync(0xffffffffu, numbers_, place_); }

  __device__ int of_row(int) const { return number_; }

 private:
  static constexpr int lanes = 32;

  /// The number of the lane's step, counted from that of `first_key`; 0 if it has no valid key.
  __device__ static int ask(const Blocks& blocks, Range valid, int first_key) {
    const int lane_key = first_key + int(threadIdx.x % lanes) * config.keys();
    const int position = maximum(lane_key, valid.begin);
    const bool has_keys = position < minimum(lane_key + config.warp_keys, valid.end);
    return has_keys ? blocks.number_at(position) : 0;
  }

  int place_;    // of the step among those of `numbers_`
  int numbers_;  // of 32 steps, one a lane
  int later_;    // of the 32 after them
  int number_;   // of the step
};

}  // namespace cupyflash
