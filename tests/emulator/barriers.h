// The barriers of a block beside __syncthreads: bar by number, and mbarrier in shared memory.
#pragma once

namespace emulator {

/// bar.arrive and bar.sync, by whole warps.
void arrive_at_named(int number, int threads);
void await_named(int number, int threads);

/// mbarrier. A phase ends when all have arrived and all bytes that were announced have come.
void initialise_mbarrier(unsigned address, int arrivals);
void publish_mbarriers();
void arrive_at_mbarrier(unsigned address);
void expect_bytes(unsigned address, int bytes);
/// mbarrier.try_wait.parity, until it succeeds.
void await_mbarrier(unsigned address, unsigned parity);

/// Copies: that one may report here, and that it has.
void check_published(unsigned mbarrier);
void complete_bytes(unsigned mbarrier, int bytes);

void start_barriers();

}  // namespace emulator
