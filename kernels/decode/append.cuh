// New tokens into a cache, in place and nowhere else, keys turned to their positions; and queries,
// turned, into memory of their own. One warp a (token, head).
#pragma once

#include "arch/convert.cuh"
#include "attention/cache_entry.cuh"
#include "attention/config_decode.cuh"

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
      return static_cast<Value*>(cache) + place.block * strides.batch + place.row * strides.row +
             head * strides.head;
    };
    const int dim = params_.attention.head_dim;
    turn<config.width>(from(params_.new_key, params_.new_key_strides),
                       to(params_.key, params_.key_strides), dim, position);
    copy<config.width>(from(params_.new_value, params_.new_value_strides),
                       to(params_.value, params_.value_strides), 0, params_.attention.head_dim_v);
  }

  /// Turns query `query` of a head.
  __device__ void turn_query(int query, int head) const {
    const Strides &given = params_.query_strides, &turned = params_.attended_strides;
    const int position = entry_.used + (params_.turns_each_query ? query : 0);
    turn<1>(static_cast<const Value*>(params_.query) + entry_.index * given.batch +
                query * given.row + head * given.head,
            static_cast<Value*>(params_.attended) + entry_.index * turned.batch +
                query * turned.row + head * turned.head,
            params_.attention.head_dim, position);
  }

 private:
  __device__ static int lane() { return threadIdx.x & 31; }

  /// Bit by bit.
  template <int width>
  __device__ static void copy(const Value* from, Value* to, int begin, int end) {
    using Part = Vector<Value, width>;
    for (int col = begin + lane() * width; col < end; col += 32 * width) {
      *reinterpret_cast<Part*>(to + col) = *reinterpret_cast<const Part*>(from + col);
    }
  }

  /// A pair of elements is a number that is multiplied by cos + i sin; others are copied.
  template <int width>
  __device__ void turn(const Value* from, Value* to, int dim, int position) const {
    if constexpr (!config.rotary) {
      copy<width>(from, to, 0, dim);
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
        to[one] = from_accumulator<Value>(x * c - y * s);
        to[two] = from_accumulator<Value>(y * c + x * s);
      }
      copy<1>(from, to, 2 * pairs, dim);
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
