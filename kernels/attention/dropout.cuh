// Dropout as a pure function of (seed, batch, head, query, key): Philox-4x32-10 (Salmon, Moraes,
// Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
//
// One counter serves the four elements (i, j), (i, j + 8), (i + 8, j), (i + 8, j + 8): bit 3 of i
// and of j choose the word, the other bits make the counter.
#pragma once

#include "attention/sequence.cuh"

namespace cupyflash {

/// Philox-4x32 with ten rounds.
__device__ inline uint4 philox(uint4 counter, unsigned key_low, unsigned key_high) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const unsigned high_x = __umulhi(counter.x, 0xd2511f53u), low_x = counter.x * 0xd2511f53u;
    const unsigned high_z = __umulhi(counter.z, 0xcd9e8d57u), low_z = counter.z * 0xcd9e8d57u;
    counter = make_uint4(high_z ^ counter.y ^ key_low, low_z, high_x ^ counter.w ^ key_high, low_x);
    key_low += 0x9e3779b9u;
    key_high += 0xbb67ae85u;
  }
  return counter;
}

/// Which probabilities of one head of one sequence are kept, and what those are multiplied by.
template <auto config>
struct Dropout {
  using T = Accumulator<config.dtype>;

  unsigned key_low;
  unsigned key_high;
  unsigned threshold;
  unsigned head;
  unsigned batch;
  T keep_factor;  // 1 / (1 - dropout_p)

  template <class Params>
  __device__ Dropout(const Params& params, const Sequence& sequence, int head_index) {
    if constexpr (config.dropout) {
      const uint64 seed = params.seed_address == nullptr ? params.seed : *params.seed_address;
      key_low = unsigned(seed);
      key_high = unsigned(seed >> 32);
      threshold = params.attention.dropout_threshold;
      head = head_index;
      batch = sequence.batch;
      keep_factor = T(params.attention.keep_factor);
    }
  }

  /// Indices without bit 3.
  __device__ static unsigned group(unsigned index) { return index >> 4 << 3 | (index & 7); }

  /// The words of (i, j), (i, j + 8), (i + 8, j), (i + 8, j + 8), bit 3 of i and j being 0.
  __device__ uint4 words(int query_index, int key_index) const {
    return philox(make_uint4(group(key_index), group(query_index), head, batch), key_low, key_high);
  }

  /// Whether the word of an element says that it is kept.
  __device__ bool keeps(unsigned word) const { return word >= threshold; }

  /// Whether one element, of any indices, is kept.
  __device__ bool keeps(int query_index, int key_index) const {
    const uint4 four = words(query_index, key_index);
    const unsigned left = query_index & 8 ? four.z : four.x;
    const unsigned right = query_index & 8 ? four.w : four.y;
    return keeps(key_index & 8 ? right : left);
  }
};

}  // namespace cupyflash
