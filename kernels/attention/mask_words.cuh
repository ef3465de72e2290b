// The boolean mask of a warp's tile as words, a bit a key: read 16 keys at a time, not one by one.
#pragma once

#include "attention/element_mask.cuh"
#include "tile/fragment_mma.cuh"

namespace cupyflash {

/// A bit for each byte that is not 0, the lowest byte's first.
__device__ inline unsigned nonzero_bytes(unsigned four) {
  const unsigned marks = ((four & 0x7f7f7f7fu) + 0x7f7f7f7fu) | four;  // in each byte's highest bit
  return ((marks >> 7 & 0x01010101u) * 0x10204080u) >> 28;
}

/// The call's mask, where it is the only one, of 16 or 32 neighbouring keys.
template <int keys>
struct MaskWords {
  static constexpr bool possible = keys == 16 || keys == 32;

  const MaskPlane& mask;
  int first_key;

  /// Whether the mask has all of these keys, in aligned rows; alike in all lanes.
  __device__ bool readable() const {
    const auto address = reinterpret_cast<uint64>(mask.first);
    return mask.strides.col == 1 && (address | mask.strides.row) % 16 == 0 &&
           first_key + keys <= mask.strides.cols;
  }

  /// Which of the keys one query sees.
  __device__ unsigned word(int query_index) const {
    if (query_index >= mask.strides.rows) return 0;
    const auto* vectors =
        reinterpret_cast<const uint4*>(mask.first + mask.strides.at(query_index, first_key));
    unsigned seen = 0;
#pragma unroll
    for (int v = 0; v < keys / 16; ++v) {
      const uint4 bytes = vectors[v];
      seen |= (nonzero_bytes(bytes.x) | nonzero_bytes(bytes.y) << 4 | nonzero_bytes(bytes.z) << 8 |
               nonzero_bytes(bytes.w) << 12)
              << (16 * v);
    }
    return seen;
  }
};

/// Hides what the mask hides in a warp's scores, rows of which are queries, or keys where
/// `transposed`. A lane reads the words of its query, and gets those of others.
template <bool transposed, int keys, int m_tiles, int n_tiles>
__device__ void hide_by_words(MmaFragment<m_tiles, n_tiles>& scores, const MaskWords<keys>& mask,
                              int first_query) {
  constexpr int queries = transposed ? 8 * n_tiles : 16 * m_tiles;
  unsigned words[ceil_div(queries, 32)];
#pragma unroll
  for (int first = 0; first < queries; first += 32) {
    words[first / 32] = mask.word(first_query + first + MmaLane::lane());
  }
  const int own_query = transposed ? MmaLane::col() : MmaLane::row();
  const int own_key = transposed ? MmaLane::row() : MmaLane::col();
#pragma unroll
  for (int half = 0; half < queries / 8 * (transposed ? 2 : 1); ++half) {
    // Rows 8 half ... of S, or columns 8 (half / 2) + half % 2 ... of S^T.
    const int query = transposed ? half / 2 * 8 + half % 2 : half * 8;
    const unsigned word =
        __shfl_sync(0xffffffffu, words[query / 32], query % 32 + own_query) >> own_key;
#pragma unroll
    for (int other = 0; other < keys / 8 * (transposed ? 1 : 2); ++other) {
      const int key = transposed ? other * 8 : other / 2 * 8 + other % 2;
      const int row = transposed ? key : query, col = transposed ? query : key;
      if ((word >> key & 1) == 0) {
        scores.at[row / 16][col / 8][row % 16 / 8 * 2 + col % 8] = -infinity<float>;
      }
    }
  }
}

}  // namespace cupyflash
