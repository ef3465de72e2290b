// Host version of kernels/arch/stmatrix.cuh.
#pragma once

namespace cupyflash {

inline void store_matrices(unsigned address, const unsigned (&fragment)[4]) {
  const unsigned char* slots = emulator::exchange(&address, sizeof(address));
  const int row = emulator::lane() / 4, word = emulator::lane() % 4;
  for (int number = 0; number < 4; ++number) {
    const unsigned target = emulator::read_slot<unsigned>(slots, number * 8 + row);
    emulator::shared_at(target, 16);
    emulator::write_shared(target + word * 4, fragment[number]);
  }
  emulator::await_warp();
}

}  // namespace cupyflash
