// Which sequence, head and tile a thread block works on: the only place that knows lengths and
// offsets, of equally long sequences and of varlen entries.
#pragma once

#include "attention/params.cuh"
#include "common/math.cuh"
#include "tile/load.cuh"

namespace cupyflash {

/// One sequence pair. Varlen: an entry; its rows start at first_query and first_key.
struct Sequence {
  int batch;
  int first_query;
  int first_key;
  int seqlen_q;
  int seqlen_k;

  /// Key that windows and ALiBi place under query 0.
  __device__ int diagonal(const Attention& attention) const {
    return attention.top_left ? 0 : seqlen_k - seqlen_q;
  }

  /// Rows after the last varlen entry see nothing and are seen by nothing.
  __device__ void hide_others(bool of_keys) { (of_keys ? seqlen_q : seqlen_k) = 0; }
};

/// Start of varlen entry `entry`, never outside the array however wrong cu_seqlens is. The rows
/// after the last entry count as an entry of their own.
__device__ inline int entry_start(const int* cu_seqlens, int entry, int batch, int total) {
  return entry > batch ? total : maximum(0, minimum(cu_seqlens[entry], total));
}

/// The pair of varlen entry `entry`, which may be that of the rows after the last one.
__device__ inline Sequence varlen_sequence(const int* cu_seqlens_q, const int* cu_seqlens_k,
                                           const Attention& attention, int entry) {
  const int batch = attention.batch;
  const int query = entry_start(cu_seqlens_q, entry, batch, attention.seqlen_q);
  const int query_end = entry_start(cu_seqlens_q, entry + 1, batch, attention.seqlen_q);
  const int key = entry_start(cu_seqlens_k, entry, batch, attention.seqlen_k);
  const int key_end = entry_start(cu_seqlens_k, entry + 1, batch, attention.seqlen_k);
  return {entry, query, key, maximum(0, query_end - query), maximum(0, key_end - key)};
}

/// A tile of rows (queries or keys) of one head.
struct TileIndex {
  Sequence sequence;
  int head;
  int first_row;
};

/// The tile of thread block `index`, 0 <= index < tile_slots * heads * batch (varlen: * 1).
///
/// With a window, all heads' longest tiles start first, and short ones fill the end: the last
/// query tiles are the longest, and the first key tiles. Otherwise a head's tiles are neighbours,
/// which then share its keys and values in the L2 cache.
template <bool varlen, bool window, bool of_keys, int block, class Params>
__device__ TileIndex locate_tile(const Params& params, int index, int heads) {
  const Attention& attention = params.attention;
  const int total = of_keys ? attention.seqlen_k : attention.seqlen_q;
  // Entry e owns the slots from start(e) / block + e on. They increase strictly, and an entry has
  // at least as many slots as tiles, so a binary search finds it; spare slots start past its end.
  const int slots = varlen ? total / block + attention.batch + 1 : ceil_div(total, block);
  const int sequences = varlen ? 1 : attention.batch;
  const int outer = heads * sequences;
  const int slot = window ? index / outer : index % slots;
  const int head_and_batch = window ? index % outer : index / slots;
  const int tile = window && !of_keys ? slots - 1 - slot : slot;
  const int head = head_and_batch % heads;

  if constexpr (varlen) {
    const int* cu_seqlens = of_keys ? params.cu_seqlens_k : params.cu_seqlens_q;
    int low = 0, high = attention.batch;  // the entry is in [low, high]
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      const int start = entry_start(cu_seqlens, middle, attention.batch, total);
      if (start / block + middle <= tile) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const int start = entry_start(cu_seqlens, low, attention.batch, total);
    const int local = tile - start / block - low;
    TileIndex found = {varlen_sequence(params.cu_seqlens_q, params.cu_seqlens_k, attention, low),
                       head, local < 0 ? total : local * block};
    if (low == attention.batch) found.sequence.hide_others(of_keys);
    return found;
  } else {
    const int batch = head_and_batch / heads;
    return {{batch, 0, 0, attention.seqlen_q, attention.seqlen_k}, head, tile * block};
  }
}

/// Rows of one head in a sequence. `first_row` is the sequence's first_query or first_key.
template <class Element, class Pointer>
__device__ GlobalRows<Element> head_rows(Pointer pointer, const Strides& strides, int batch,
                                         int first_row, int head, int dim) {
  const int64 offset = batch * strides.batch + first_row * strides.row + head * strides.head;
  return {static_cast<Element*>(pointer) + offset, strides.row, dim};
}

/// Index along the batch axis of an array of scores. Rows after the last varlen entry have none of
/// their own, and see nothing anyway.
__device__ inline int score_batch(const Sequence& sequence, int batches) {
  return maximum(0, minimum(sequence.batch, batches - 1));
}

/// Address of the statistic of a sequence's first query, or null.
template <class T, class Pointer>
__device__ T* statistic_row(Pointer pointer, const Strides& strides, const Sequence& sequence,
                            int head) {
  if (pointer == nullptr) return nullptr;
  return static_cast<T*>(pointer) + sequence.batch * strides.batch +
         sequence.first_query * strides.row + head * strides.head;
}

}  // namespace cupyflash
