// A tile of bytes transposed in shared memory, for products that read it by columns only.
#pragma once

#include "arch/ldmatrix.cuh"
#include "arch/stmatrix.cuh"
#include "tile/panels.cuh"

namespace cupyflash {

/// Writes `source` (keys x dims, bytes) to `target` (dims x keys) by warps `warp`, `warp` +
/// `warps`, ... of the block's; each moves 16 dims of all keys at a time, 32 keys by an
/// instruction. These are read before the first is written, as far as there are registers: none
/// waits for another's way.
///
/// Keys take the places in which Float8Operand leaves probabilities: of 16 keys, place 4 t + i is
/// key 2 t + i % 2 + 8 (i / 2). A transposing ldmatrix gives lane (g, t) dims 2 g and 2 g + 1 of
/// keys 2 t and 2 t + 1, and of the keys 8 further on in its next register: two words of four
/// places, one for each dim. Half of the lanes swap them, so that the rows which one stmatrix
/// writes lie in eight different groups of banks.
template <int warps, class Source, class Target>
__device__ inline void transpose_float8(const Source& source, const Target& target, int warp) {
  static_assert(Source::rows % 32 == 0 && Target::rows % 16 == 0);
  constexpr int key_groups = Source::rows / 32;
  constexpr int together = key_groups % 4 == 0 ? 4 : 3;  // six would be spilled
  static_assert(key_groups % together == 0);
  const int lane = threadIdx.x & 31;
  const bool swapped = lane >> 4;  // of lane (g, t): g >= 4
  const unsigned even = swapped ? 0x7531 : 0x6420, odd = swapped ? 0x6420 : 0x7531;
  // Of the four matrices that stmatrix writes, this lane addresses row `g` of number `matrix`.
  const int matrix = lane >> 3, g = lane & 7;
  const int row = 2 * g + ((matrix & 1) ^ (g >> 2));
  const unsigned first = target.chunk(row, matrix >> 1);
#pragma unroll 1
  for (int dims = warp; dims < Target::rows / 16; dims += warps) {
    const unsigned from = source.chunk(lane, dims), to = first + dims * 16 * Target::Panel::pitch;
#pragma unroll
    for (int group = 0; group < key_groups; group += together) {
      unsigned in[together][4];
#pragma unroll
      for (int i = 0; i < together; ++i) {
        load_matrices_transposed(in[i], from + (group + i) * 32 * Source::Panel::pitch);
      }
#pragma unroll
      for (int i = 0; i < together; ++i) {
        const int keys = group + i;
        const unsigned (&each)[4] = in[i];
        const unsigned out[4] = {
            __byte_perm(each[0], each[1], even), __byte_perm(each[0], each[1], odd),
            __byte_perm(each[2], each[3], even), __byte_perm(each[2], each[3], odd)};
        store_matrices((to ^ keys % 4 << 5) + keys / 4 * Target::Panel::bytes, out);
      }
    }
  }
}

}  // namespace cupyflash
