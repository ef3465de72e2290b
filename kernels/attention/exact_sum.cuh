// Sums that are exact until the end, so that the order in which threads add does not matter: the
// same bits in every run, by integer atomics alone.
#pragma once

#include "common/math.cuh"
#include "common/types.cuh"

namespace cupyflash {

/// A number in fixed point, 32 bits a word; word k counts in units of 2**(32 k - offset). The upper
/// halves of the words take what 2**31 additions carry. One more word counts NaN and infinities.
template <class T>
struct ExactSum {
  static constexpr bool wide = sizeof(T) == 8;
  static constexpr int mantissa_bits = wide ? 52 : 23;  // that are stored
  static constexpr int exponent_mask = wide ? 2047 : 255;
  static constexpr int offset = wide ? 1074 : 149;
  static constexpr int digits = wide ? 66 : 9;
  static constexpr int words = digits + 1;

  uint64* at;

  __device__ void add(T value) const {
    const uint64 bits = bits_of(value);
    const int exponent = int(bits >> mantissa_bits) & exponent_mask;
    if (exponent == exponent_mask) {
      atomicAdd(at + digits, 1ull);
      return;
    }
    uint64 mantissa = bits & ((1ull << mantissa_bits) - 1);
    if (exponent > 0) mantissa |= 1ull << mantissa_bits;
    const int position = exponent > 0 ? exponent - 1 : 0;
    const int shift = position % 32;
    const bool negative = value < T(0);
#pragma unroll
    for (int k = 0; k < (wide ? 3 : 2); ++k) {
      const uint64 shifted = k == 0 ? mantissa << shift : mantissa >> 1 >> (32 * k - shift - 1);
      const uint64 digit = shifted & 0xffffffffu;
      if (digit != 0) atomicAdd(at + position / 32 + k, negative ? 0 - digit : digit);
    }
  }

  /// Brings the words into [0, 2**32), all but the highest, which has the sign, and adds them up.
  __device__ T rounded() const {
    int64 carry = 0;
    for (int k = 0; k < digits; ++k) {
      const int64 word = int64(at[k]) + carry;
      carry = word >> 32;
      at[k] = k + 1 < digits ? word & 0xffffffff : word;
    }
    double sum = 0.0;
    for (int k = digits - 1; k >= 0; --k) sum += ldexp(double(int64(at[k])), 32 * k - offset);
    return at[digits] == 0 ? T(sum) : infinity<T> - infinity<T>;
  }

 private:
  __device__ static uint64 bits_of(float value) { return __float_as_uint(value); }
  __device__ static uint64 bits_of(double value) { return uint64(__double_as_longlong(value)); }
};

/// sums[i] = words[i], rounded; a thread an element.
struct RoundParams {
  uint64* words;  // (size, ExactSum<T>::words)
  void* sums;     // (size,)
  int64 size;
};

template <class T>
__device__ void round_exact_sums(const RoundParams& params) {
  const int64 index = int64(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= params.size) return;
  const ExactSum<T> sum{params.words + index * ExactSum<T>::words};
  static_cast<T*>(params.sums)[index] = sum.rounded();
}

}  // namespace cupyflash
