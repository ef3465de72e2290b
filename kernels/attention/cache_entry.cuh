// How far an entry of a cache is filled, where its tokens stand, and which of them each query sees:
// the only place that knows. Lengths, left padding and pages come from the device, so that nobody
// has looked at them: whatever they are, nothing outside the cache is touched.
#pragma once

#include "attention/key_range.cuh"
#include "attention/params_decode.cuh"

namespace cupyflash {

__device__ inline int clamped(int value, int last) { return maximum(0, minimum(value, last)); }

/// Tokens begin <= position < end of an entry take part; new ones stand from `used` on.
struct CacheEntry {
  int index;  // in the batch
  int begin;
  int used;
  int end;
  bool as_given;  // nothing had to be clamped

  __device__ CacheEntry(const CacheParams& params, int index) : index(index) {
    const int capacity = params.attention.seqlen_k;
    const int length = params.lengths == nullptr ? int(params.length)
                                                 : params.lengths[index * params.lengths_stride];
    const int pad = params.leftpad == nullptr ? 0 : params.leftpad[index * params.leftpad_stride];
    used = clamped(length, capacity);
    end = minimum(used + params.new_tokens, capacity);
    begin = minimum(clamped(pad, capacity), end);
    as_given = used == length && clamped(pad, capacity) == pad;
  }

  /// Queries are its last tokens.
  __device__ Sequence sequence(const Attention& attention) const {
    return {index, 0, 0, attention.seqlen_q, end};
  }
};

/// Which positions queries see.
template <bool window>
struct CacheBand {
  Band band;
  int begin;

  __device__ CacheBand(const Attention& attention, const CacheEntry& entry)
      : band(visible_band<window>(attention, entry.sequence(attention))), begin(entry.begin) {}

  __device__ Range seen_by(int query) const { return from_begin(band.seen_by(query)); }
  __device__ Range seen_by_any(Range queries) const {
    return from_begin(band.seen_by_any(queries));
  }
  __device__ Range seen_by_all(Range queries) const {
    return from_begin(band.seen_by_all(queries));
  }

 private:
  __device__ Range from_begin(Range range) const {
    return {maximum(begin, range.begin), range.end};
  }
};

/// Where a token stands.
struct CachePlace {
  int block;
  int row;
  bool exists;  // else block and row are the nearest that do
};

/// The blocks of one entry.
template <int page_size>
struct CacheBlocks {
  const int* pages;  // of the entry
  int64 stride;
  int num_blocks;
  int capacity;
  int number;  // of the entry's only block

  __device__ CacheBlocks(const CacheParams& params, int entry)
      : pages(params.blocks + entry * params.blocks_stride),
        stride(params.blocks_page_stride),
        num_blocks(params.num_blocks),
        capacity(params.attention.seqlen_k),
        number(entry) {
    if (page_size == 0 && params.blocks != nullptr) number = pages[0];
  }

  /// What the table says; the position is one of the entry's.
  __device__ int number_at(int position) const {
    if constexpr (page_size == 0) {
      return number;
    } else {
      return pages[position / page_size * stride];
    }
  }

  /// Place of a position, given `number_at` of it.
  __device__ CachePlace place(int number, int position) const {
    const int row = page_size == 0 ? position : position % (page_size == 0 ? 1 : page_size);
    return {clamped(number, num_blocks - 1), row, unsigned(number) < unsigned(num_blocks)};
  }

  /// Place of any position, also of one that no entry has.
  __device__ CachePlace find(int position) const {
    const int inside = clamped(position, capacity - 1);
    CachePlace found = place(number_at(inside), inside);
    found.exists = found.exists && inside == position;
    return found;
  }
};

/// Which keys are whose, where several blocks share those of an entry: steps of `keys` keys,
/// counted from position 0.
struct SplitOf {
  Range steps;    // that the rows of the tile need
  int per_split;  // steps
  bool fixed;     // every split has its place, wherever the entry ends

  __device__ SplitOf(const CacheParams& params, Range seen, int keys)
      : steps(tiles_of(seen, keys)), fixed(params.split_keys != 0) {
    per_split = fixed ? params.split_keys / keys
                      : maximum(1, ceil_div(steps.end - steps.begin, params.num_splits));
  }

  __device__ Range steps_of(int split) const {
    const int first = (fixed ? 0 : steps.begin) + split * per_split;
    return {maximum(steps.begin, first), minimum(steps.end, first + per_split)};
  }

  /// Those that have any.
  __device__ Range splits() const {
    if (steps.begin >= steps.end) return {0, 0};
    const int origin = fixed ? 0 : steps.begin;
    return {(steps.begin - origin) / per_split, ceil_div(steps.end - origin, per_split)};
  }
};

/// A tile of rows: row r is query r / group_size of the group's head r % group_size.
struct RowTile {
  int first_row;
  int rows;  // that exist of the whole group
  int group_size;

  __device__ int query(int row) const { return row / group_size; }
  __device__ int head(int row) const { return row % group_size; }  // in the group
  /// Queries of `count` rows from `first` on, of those that exist.
  __device__ Range queries(int first, int count) const {
    return {query(first), query(maximum(0, minimum(first + count, rows) - 1)) + 1};
  }
};

}  // namespace cupyflash
