// New tokens into a cache, in place and nowhere else, keys turned to their positions, 16-bit ones
// rounded to FP8 if the cache is that; and queries, turned, into memory of their own. One warp a
// (token, head).
#pragma once

#include "arch/convert.cuh"
#include "attention/cache_entry.cuh"
#include "attention/config_decode.cuh"
#include "attention/descale.cuh"

namespace cupyflash {

constexpr int append_threads = 128;

/// One head of one token.
template <class Element>
struct TokenRow {
  Element* first;
  int dim;
};

template <AppendConfig config>
class Append {
 public:
  using Value = Element<config.dtype>;
  using Cached = Element<config.kv_dtype>;
  using Angle = Element<config.rotary_dtype>;
  using Wide = Accumulator<config.dtype>;

  __device__ Append(const CacheParams& params, int entry)
      : params_(params), entry_(params, entry) {}

  /// Writes new token `token` of a head into both caches.
  __device__ void write(int token, int head) const {
    const int position = entry_.used + token;
    const CachePlace place = CacheBlocks<config.page_size>(params_, entry_.index).find(position);
    if (!place.exists) {
      if (head == 0 && lane() == 0) atomicAdd(params_.faults, 1);
      return;
    }
    const auto from = [&](const void* array, const Strides& strides) {
      return static_cast<const Value*>(array) + entry_.index * strides.batch + token * strides.row +
             head * strides.head;
    };
    const auto to = [&](void* cache, const Strides& strides) {
      return static_cast<Cached*>(cache) + place.block * strides.batch + place.row * strides.row +
             head * strides.head;
    };
    const int dim = params_.attention.head_dim;
    const float key_factor =
        factor(params_.key_scale, params_.key_descale, params_.key_descale_strides, head);
    const float value_factor =
        factor(params_.value_scale, params_.value_descale, params_.value_descale_strides, head);
    turn<config.width>(from(params_.new_key, params_.new_key_strides),
                       to(params_.key, params_.key_strides), dim, position, key_factor);
    copy<config.width>(from(params_.new_value, params_.new_value_strides),
                       to(params_.value, params_.value_strides), 0, params_.attention.head_dim_v,
                       value_factor);
  }

  /// Turns query `query` of a head.
  __device__ void turn_query(int query, int head) const {
    const Strides &given = params_.query_strides, &turned = params_.attended_strides;
    const int position = entry_.used + (params_.turns_each_query ? query : 0);
    turn<1>(static_cast<const Value*>(params_.query) + entry_.index * given.batch +
                query * given.row + head * given.head,
            static_cast<Value*>(params_.attended) + entry_.index * turned.batch +
                query * turned.row + head * turned.head,
            params_.attention.head_dim, position, 1.0f);
  }

 private:
  __device__ static int lane() { return threadIdx.x & 31; }

  /// What a head's numbers in the cache are to be multiplied by.
  __device__ float factor(double number, const float* array, const DescaleStrides& strides,
                          int head) const {
    if constexpr (!config.quantizes()) return 1.0f;
    const Attention& attention = params_.attention;
    return float(number * descale_of(array, strides, attention, entry_.sequence(attention),
                                     head * attention.group_size));
  }

  /// A new token's element where it is to stand: as it is, bit by bit, or rounded to FP8.
  __device__ static Value stored(Value value, const Value*, float) { return value; }
  template <class Narrow>
  __device__ static Narrow stored(Value value, const Narrow*, float factor) {
    return from_accumulator<Narrow>(to_accumulator(value) / factor);
  }

  template <int width, class To>
  __device__ static void copy(const Value* from, To* to, int begin, int end, float factor) {
    for (int col = begin + lane() * width; col < end; col += 32 * width) {
      const auto part = *reinterpret_cast<const Vector<Value, width>*>(from + col);
      Vector<To, width> target;
#pragma unroll
      for (int w = 0; w < width; ++w) target[w] = stored(part[w], to, factor);
      *reinterpret_cast<Vector<To, width>*>(to + col) = target;
    }
  }

  /// A pair of elements is a number that is multiplied by cos + i sin; others are copied.
  template <int width, class To>
  __device__ void turn(const Value* from, To* to, int dim, int position, float factor) const {
    if constexpr (!config.rotary) {
      copy<width>(from, to, 0, dim, factor);
    } else {
      const int64 angle = clamped(position, params_.rotary_rows - 1);
      const Angle* cos = static_cast<const Angle*>(params_.cos) + angle * params_.cos_strides[0];
      const Angle* sin = static_cast<const Angle*>(params_.sin) + angle * params_.sin_strides[0];
      const int pairs = params_.rotary_pairs;
      for (int pair = lane(); pair < pairs; pair += 32) {
        const int one = config.interleaved ? 2 * pair : pair;
        const int two = config.interleaved ? one + 1 : one + pairs;
        const Wide c = to_accumulator(cos[pair * params_.cos_strides[1]]);
        const Wide s = to_accumulator(sin[pair * params_.sin_strides[1]]);
        const Wide x = to_accumulator(from[one]), y = to_accumulator(from[two]);
        to[one] = stored(from_accumulator<Value>(x * c - y * s), to, factor);
        to[two] = stored(from_accumulator<Value>(y * c + x * s), to, factor);
      }
      copy<1>(from, to, 2 * pairs, dim, factor);
    }
  }

  const CacheParams& params_;
  CacheEntry entry_;
};

template <AppendConfig config>
__device__ void append(const CacheParams& params) {
  const Attention& attention = params.attention;
  const int heads_kv = attention.num_heads / attention.group_size;
  const int written = params.new_tokens * heads_kv;
  const int turned = config.rotary ? attention.seqlen_q * attention.num_heads : 0;
  const int64 index = (int64(blockIdx.x) * append_threads + threadIdx.x) / 32;
  const int entry = int(index / (written + turned)), rest = int(index % (written + turned));
  if (entry >= attention.batch) return;
  const Append<config> entry_append(params, entry);
  if (rest < written) {
    entry_append.write(rest / heads_kv, rest % heads_kv);
  } else {
    entry_append.turn_query((rest - written) / attention.num_heads,
                            (rest - written) % attention.num_heads);
  }
}

}  // namespace cupyflash
