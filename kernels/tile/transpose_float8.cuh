// A tile of bytes transposed in shared memory, for products that read it by columns only.
#pragma once

#include "arch/ldmatrix.cuh"
#include "arch/stmatrix.cuh"
#include "tile/panels.cuh"

namespace cupyflash {

/// Writes `source` (keys x dims, bytes) to `target` (dims x keys) by warps `warp`, `warp` +
/// `warps`,
/// ... of the block's; each moves 32 keys of 16 dims at a time.
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
  const int lane = threadIdx.x & 31;
  const bool swapped = lane >> 4;  // of lane (g, t): g >= 4
  const unsigned even = swapped ? 0x7531 : 0x6420, odd = swapped ? 0x6420 : 0x7531;
  // Of the four matrices that stmatrix writes, this lane addresses row `g` of number `matrix`.
  const int matrix = lane >> 3, g = lane & 7;
  const int row = 2 * g + ((matrix & 1) ^ (g >> 2));
#pragma unroll 1
  for (int part = warp; part < key_groups * (Target::rows / 16); part += warps) {
    const int keys = part % key_groups, dims = part / key_groups;
    unsigned in[4];
    load_matrices_transposed(in, source.chunk(32 * keys + lane, dims));
    const unsigned out[4] = {__byte_perm(in[0], in[1], even), __byte_perm(in[0], in[1], odd),
                             __byte_perm(in[2], in[3], even), __byte_perm(in[2], in[3], odd)};
    store_matrices(target.chunk(16 * dims + row, 2 * keys + (matrix >> 1)), out);
  }
}

}  // namespace cupyflash
