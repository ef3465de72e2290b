// Element types, and the types that sums, scores and statistics are kept in.
#pragma once

namespace cupyflash {

using int64 = long long;
using uint64 = unsigned long long;
using uint8 = unsigned char;

enum class DataType { float16, bfloat16, float32, float64, float8_e4m3fn };

__device__ constexpr bool is_float8(DataType dtype) { return dtype == DataType::float8_e4m3fn; }

/// Short storage formats: only conversions do something with them, so no CUDA header is needed.
struct Float16 {
  unsigned short bits;
};
struct BFloat16 {
  unsigned short bits;
};
struct Float8E4M3 {
  unsigned char bits;
};

template <DataType dtype>
struct TypesOf;
template <>
struct TypesOf<DataType::float16> {
  using Element = Float16;
  using Accumulator = float;
};
template <>
struct TypesOf<DataType::bfloat16> {
  using Element = BFloat16;
  using Accumulator = float;
};
template <>
struct TypesOf<DataType::float32> {
  using Element = float;
  using Accumulator = float;
};
template <>
struct TypesOf<DataType::float64> {
  using Element = double;
  using Accumulator = double;
};

template <>
struct TypesOf<DataType::float8_e4m3fn> {
  using Element = Float8E4M3;
  using Accumulator = float;
};

template <DataType dtype>
using Element = typename TypesOf<dtype>::Element;
template <DataType dtype>
using Accumulator = typename TypesOf<dtype>::Accumulator;

/// Neighbouring elements that move in one instruction.
template <class T, int width>
struct alignas(sizeof(T) * width) Vector {
  T data[width];
  __device__ T& operator[](int index) { return data[index]; }
  __device__ const T& operator[](int index) const { return data[index]; }
};

/// Elements of the widest load of shared memory, 16 bytes.
template <class T>
constexpr int widest = 16 / int(sizeof(T));

/// `Type` is A if `first`, else B.
template <bool first, class A, class B>
struct Either {
  using Type = A;
};
template <class A, class B>
struct Either<false, A, B> {
  using Type = B;
};

struct Nothing {};

/// Half-open interval of rows, keys or queries; empty unless begin < end.
struct Range {
  int begin;
  int end;
  __device__ bool contains(int index) const { return begin <= index && index < end; }
  __device__ bool covers(Range other) const { return begin <= other.begin && other.end <= end; }
  __device__ bool meets(Range other) const { return begin < other.end && other.begin < end; }
};

}  // namespace cupyflash
