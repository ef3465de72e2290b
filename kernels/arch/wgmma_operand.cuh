// Matrix descriptors: how wgmma (sm_90a) is told where an operand lies in shared memory.
#pragma once

#include "common/types.cuh"

namespace cupyflash {

/// Describes an operand of rows of 128 bytes, permuted as by SwizzledTile of 64 columns, at
/// `address`. `panel_bytes` is the distance to the columns after these 64; operands by columns
/// never come to them.
__device__ inline uint64 describe_operand(unsigned address, int panel_bytes) {
  constexpr uint64 swizzle_128_bytes = uint64(1) << 62;
  constexpr uint64 eight_rows = uint64(1024 >> 4) << 32;
  return swizzle_128_bytes | eight_rows | uint64(panel_bytes >> 4) << 16 |
         uint64((address & 0x3ffff) >> 4);
}
/// The same operand `bytes` further on.
__device__ inline uint64 advance_operand(uint64 operand, int bytes) {
  return operand + uint64(bytes >> 4);
}

}  // namespace cupyflash
