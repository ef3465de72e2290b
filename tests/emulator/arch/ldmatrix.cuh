// Host version of kernels/arch/ldmatrix.cuh.
#pragma once

namespace cupyflash {

/// Element (row, col) of matrix `number`, whose rows' addresses the lanes have shown.
inline unsigned matrix_element(const unsigned char* slots, int number, int row, int col) {
  const unsigned address = emulator::read_slot<unsigned>(slots, number * 8 + row);
  unsigned short element;
  memcpy(&element, emulator::shared_at(address, 16) + col * sizeof(element), sizeof(element));
  return element;
}

template <bool transposed>
void load_four_matrices(unsigned (&fragment)[4], unsigned address) {
  const unsigned char* slots = emulator::exchange(&address, sizeof(address));
  const int row = emulator::lane() / 4, col = emulator::lane() % 4 * 2;
  for (int number = 0; number < 4; ++number) {
    unsigned pair[2];
    for (int i = 0; i < 2; ++i) {
      pair[i] = transposed ? matrix_element(slots, number, col + i, row)
                           : matrix_element(slots, number, row, col + i);
    }
    fragment[number] = pair[0] | pair[1] << 16;
  }
}

inline void load_matrices(unsigned (&fragment)[4], unsigned address) {
  load_four_matrices<false>(fragment, address);
}

inline void load_matrices_transposed(unsigned (&fragment)[4], unsigned address) {
  load_four_matrices<true>(fragment, address);
}

}  // namespace cupyflash
