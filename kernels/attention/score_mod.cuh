// The user's change of the score (cupyflash.ScoreMod), its derivative, and the gradients of the
// arrays that it reads.
#pragma once

#include "arch/convert.cuh"
#include "attention/dual.cuh"
#include "attention/exact_sum.cuh"
#include "common/math.cuh"

namespace cupyflash {

/// What the user's expressions hide a key with.
constexpr float INFINITY = infinity<float>;

/// The user's expressions. The stub defines UserScore<true>:
///   static constexpr int params;         number of named arrays
///   static constexpr unsigned floating;  bit k: array k holds floats, and so has a gradient
///   static constexpr bool has_backward;
///   static auto forward(score, b, h, i, j, arrays);   the new score
///   static auto backward(score, b, h, i, j, arrays);  d new / d score, if has_backward
template <bool exists>
struct UserScore;
template <>
struct UserScore<false> {
  static constexpr int params = 0;
  static constexpr unsigned floating = 0;
};

/// A named array as expressions see it: name[flat index]. An index outside reads the nearest
/// element; of an empty array, 0.
template <class Value, class Element>
struct ScoreArray {
  const Element* data;
  int64 size;

  /// Index of the element that is read, -1 if there is none.
  __device__ int64 clamped(int64 index) const {
    index = index < 0 ? 0 : index;
    return index < size ? index : size - 1;
  }
  __device__ Value at(int64 index) const {
    if (index < 0) return Value(0);
    if constexpr (sizeof(Element) == sizeof(Value)) {
      return Value(data[index]);
    } else {
      return Value(to_accumulator(data[index]));
    }
  }
  __device__ Value operator[](int64 index) const { return at(clamped(index)); }
};

/// The same with a derivative by what read number `wanted` of one evaluation yields.
template <class T, class Element>
struct TracedScoreArray {
  ScoreArray<T, Element> array;
  int wanted;
  int& reads;      // so far
  int64& element;  // index of the wanted one

  __device__ Dual<T> operator[](int64 index) const {
    index = array.clamped(index);
    if (reads++ != wanted) return {array.at(index)};
    element = index;
    return {array.at(index), T(1)};
  }
};

/// All named arrays, as they came with the call; and as `traced` is differentiated by.
struct ScoreArrayPointers {
  const void* const* data;
  const int64* sizes;
};

template <class T>
struct PlainArrays {
  ScoreArrayPointers pointers;

  template <int slot, class Element, class Value>
  __device__ ScoreArray<Value, Element> array() const {
    return {static_cast<const Element*>(pointers.data[slot]), pointers.sizes[slot]};
  }
  template <int slot, class Element>
  __device__ auto floats() const {
    return array<slot, Element, T>();
  }
  template <int slot, class Element>
  __device__ auto integers() const {
    return array<slot, Element, Element>();
  }
};

template <class T, int traced>
struct TracedArrays : PlainArrays<T> {
  int wanted;
  int& reads;
  int64& element;

  template <int slot, class Element>
  __device__ auto floats() const {
    const auto array = PlainArrays<T>::template floats<slot, Element>();
    if constexpr (slot == traced) {
      return TracedScoreArray<T, Element>{array, wanted, reads, element};
    } else {
      return array;
    }
  }
};

/// The user's function for one head of one sequence.
template <class T, bool exists>
struct ScoreFunction {
  using User = UserScore<exists>;
  PlainArrays<T> arrays;
  int b;
  int h;

  __device__ T value(T score, int i, int j) const {
    return T(User::forward(score, b, h, i, j, arrays));
  }

  /// d value / d score.
  __device__ T factor(T score, int i, int j) const {
    if constexpr (User::has_backward) {
      return T(User::backward(score, b, h, i, j, arrays));
    } else {
      return Dual<T>(User::forward(Dual<T>(score, T(1)), b, h, i, j, arrays)).slope;
    }
  }

  /// Calls add(element, d value / d element) for each element of an array that is read.
  template <int slot, class Add>
  __device__ void for_each_read(T score, int i, int j, const Add& add) const {
    int reads = 1;
    for (int wanted = 0; wanted < reads; ++wanted) {
      reads = 0;
      int64 element = -1;
      const TracedArrays<T, slot> traced{arrays, wanted, reads, element};
      const Dual<T> value(User::forward(score, b, h, i, j, traced));
      if (element >= 0) add(element, value.slope);
    }
  }
};

/// A lane's gradients of the elements of one array: they stay in a register for as long as it
/// meets the same element. Sums in memory are numbers, or exact and then the same in every run.
template <class T, bool exact>
struct ElementGradient {
  int64 element = -1;
  T sum = T(0);

  __device__ void add(void* sums, int64 other, T gradient) {
    if (other != element) {
      write(sums);
      element = other;
      sum = T(0);
    }
    sum += gradient;
  }

  /// Writes what is left; all lanes of a warp call it together.
  __device__ void finish(void* sums) {
    int alike = 0;
    __match_all_sync(0xffffffffu, element, &alike);
    if (alike) {
#pragma unroll
      for (int lanes = 16; lanes > 0; lanes /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
      }
      if (threadIdx.x % 32 != 0) element = -1;
    }
    write(sums);
    element = -1;
    sum = T(0);
  }

 private:
  __device__ void write(void* sums) const {
    if (element < 0) return;
    if constexpr (exact) {
      ExactSum<T>{static_cast<uint64*>(sums) + element * ExactSum<T>::words}.add(sum);
    } else {
      atomicAdd(static_cast<T*>(sums) + element, sum);
    }
  }
};

/// The same for all arrays.
template <class T, bool exists, bool exact>
struct ScoreArrayGradients {
  using User = UserScore<exists>;
  static constexpr bool wanted = User::floating != 0;
  void* const* sums;  // one a named array
  ElementGradient<T, exact> gradients[User::params > 0 ? User::params : 1];

  __device__ explicit ScoreArrayGradients(void* const* sums) : sums(sums) {}

  /// One score's share, given the gradient of the changed score and the score before.
  template <int slot = 0>
  __device__ void add(const ScoreFunction<T, exists>& function, T gradient, T score, int i, int j) {
    if constexpr (slot < User::params) {
      if constexpr (User::floating >> slot & 1) {
        function.template for_each_read<slot>(score, i, j, [&](int64 element, T derivative) {
          gradients[slot].add(sums[slot], element, gradient * derivative);
        });
      }
      add<slot + 1>(function, gradient, score, i, j);
    }
  }

  template <int slot = 0>
  __device__ void finish() {
    if constexpr (slot < User::params) {
      if constexpr (User::floating >> slot & 1) gradients[slot].finish(sums[slot]);
      finish<slot + 1>();
    }
  }
};

}  // namespace cupyflash
