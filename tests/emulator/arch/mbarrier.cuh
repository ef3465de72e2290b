// Host version of kernels/arch/mbarrier.cuh.
#pragma once

#include "barriers.h"

namespace cupyflash {

struct AsyncBarrier {
  unsigned address;

  void initialise(int arrivals) const { emulator::initialise_mbarrier(address, arrivals); }
  void arrive() const { emulator::arrive_at_mbarrier(address); }
  void arrive_and_expect(int bytes) const {
    emulator::expect_bytes(address, bytes);
    emulator::arrive_at_mbarrier(address);
  }
  void wait(unsigned parity) const { emulator::await_mbarrier(address, parity); }
};

inline void publish_barriers() { emulator::publish_mbarriers(); }

}  // namespace cupyflash
