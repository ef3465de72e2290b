// Host version of kernels/arch/mma_sync.cuh.
#pragma once

#include "arch/pack.cuh"
#include "common/types.cuh"

namespace cupyflash {

/// One lane's part of both factors, in float32.
struct Factors {
  float2 a[4];
  float2 b[2];
};

inline float of_pair(float2 pair, int index) { return index == 0 ? pair.x : pair.y; }

/// Element (row, col) of the product. Lane 4 row + k % 8 / 2 holds a's and b's elements k.
inline double product_element(const unsigned char* slots, int row, int col) {
  double sum = 0;
  for (int k = 0; k < 16; ++k) {
    const int quad_lane = k % 8 / 2, half = k / 8;
    const Factors left = emulator::read_slot<Factors>(slots, row % 8 * 4 + quad_lane);
    const Factors right = emulator::read_slot<Factors>(slots, col * 4 + quad_lane);
    sum += double(of_pair(left.a[half * 2 + row / 8], k % 2)) * of_pair(right.b[half], k % 2);
  }
  return sum;
}

template <DataType dtype>
void mma_16x8x16(float (&sum)[4], const unsigned (&a)[4], unsigned b_low, unsigned b_high) {
  Factors mine;
  for (int i = 0; i < 4; ++i) {
    mine.a[i] = unpack_pair<dtype>(a[i]);
  }
  mine.b[0] = unpack_pair<dtype>(b_low);
  mine.b[1] = unpack_pair<dtype>(b_high);
  const unsigned char* slots = emulator::exchange(&mine, sizeof(mine));
  const int row = emulator::lane() / 4, col = emulator::lane() % 4 * 2;
  for (int e = 0; e < 4; ++e) {
    sum[e] = float(sum[e] + product_element(slots, row + e / 2 * 8, col + e % 2));
  }
}

}  // namespace cupyflash
