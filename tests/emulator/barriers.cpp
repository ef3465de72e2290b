// Named barriers and mbarriers.
#include "barriers.h"

#include <map>
#include <vector>

#include "copies.h"
#include "runtime.h"
#include "shared.h"

namespace emulator {
namespace {

struct NamedBarrier {
  int threads = 0, arrived = 0;
  unsigned phase = 0;
};

struct Mbarrier {
  int arrivals, pending;
  long long bytes = 0;  // announced and not yet there
  unsigned phase = 0;
  bool published = false;
  unsigned initialiser, block_phase;
  struct Arrival {
    int warp;
    unsigned time;  // of writes to shared memory, which whoever waits knows until then
  };
  std::vector<Arrival> arrived, complete;  // of this phase, and of the last one
};

constexpr int most_named = 16;
constexpr int most_counted = (1 << 20) - 1;
constexpr uint64_t seal = 0xba551e5ba551e500;  // stands in shared memory in place of the counts

NamedBarrier named[most_named];
std::map<unsigned, Mbarrier> mbarriers;

NamedBarrier& arrive(int number, int threads) {
  if (number < 1 || number >= most_named || threads % warp_size != 0 || threads <= 0) {
    fail("bar 1 to 15 of whole warps, got (number, threads)", number, threads);
  }
  NamedBarrier& barrier = named[number];
  if (barrier.arrived != 0 && barrier.threads != threads) {
    fail("bar for other numbers of threads at once", barrier.threads, threads);
  }
  barrier.threads = threads;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.phase;
  }
  note_progress();
  return barrier;
}

std::string describe_named(long long number, long long) {
  const NamedBarrier& barrier = named[number];
  return "bar " + std::to_string(number) + " (" + std::to_string(barrier.arrived) + " of " +
         std::to_string(barrier.threads) + ")";
}

Mbarrier& find(unsigned address) {
  const auto found = mbarriers.find(address);
  if (found == mbarriers.end()) {
    fail("no mbarrier was initialised at (address)", address);
  }
  if (read_shared<uint64_t>(address) != seal) {
    fail("an mbarrier was written over at (address)", address);
  }
  Mbarrier& barrier = found->second;
  if (barrier.initialiser != thread.x && barrier.block_phase == block_phase()) {
    fail("no __syncthreads since an mbarrier was initialised, (address, by thread)", address,
         barrier.initialiser);
  }
  return barrier;
}

void end_phase_if_complete(Mbarrier& barrier) {
  if (barrier.pending == 0 && barrier.bytes == 0) {
    barrier.pending = barrier.arrivals;
    ++barrier.phase;
    barrier.complete = std::move(barrier.arrived);
    barrier.arrived.clear();
  }
  note_progress();
}

std::string describe_mbarrier(long long address, long long parity) {
  const Mbarrier& barrier = mbarriers.at(unsigned(address));
  return "parity " + std::to_string(parity) + " of the mbarrier at " + std::to_string(address) +
         " (phase " + std::to_string(barrier.phase) + ", " + std::to_string(barrier.pending) +
         " arrivals and " + std::to_string(barrier.bytes) + " bytes missing)";
}

}  // namespace

void arrive_at_named(int number, int threads) {
  await_warp();
  arrive(number, threads);
}

void await_named(int number, int threads) {
  await_warp();
  const unsigned phase = named[number].phase;
  const NamedBarrier& barrier = arrive(number, threads);
  wait_until([&] { return barrier.phase != phase; }, {describe_named, number});
}

void initialise_mbarrier(unsigned address, int arrivals) {
  if (arrivals < 1 || arrivals > most_counted || mbarriers.contains(address)) {
    fail("an mbarrier twice, or of bad size, (address, arrivals)", address, arrivals);
  }
  memcpy(shared_at(address, sizeof(seal)), &seal, sizeof(seal));
  Mbarrier barrier = {arrivals, arrivals};
  barrier.initialiser = thread.x;
  barrier.block_phase = block_phase();
  mbarriers[address] = barrier;
}

void publish_mbarriers() {
  for (auto& [address, barrier] : mbarriers) {
    barrier.published = barrier.published || barrier.initialiser == thread.x;
  }
}

void arrive_at_mbarrier(unsigned address) {
  Mbarrier& barrier = find(address);
  if (barrier.pending == 0) {
    fail("one arrival too many at an mbarrier, (address, phase)", address, barrier.phase);
  }
  --barrier.pending;
  barrier.arrived.push_back({warp(), write_time()});
  end_phase_if_complete(barrier);
}

void expect_bytes(unsigned address, int bytes) {
  Mbarrier& barrier = find(address);
  barrier.bytes += bytes;
  if (bytes < 0 || barrier.bytes > most_counted) {
    fail("an mbarrier cannot count so many bytes, (address, bytes)", address, barrier.bytes);
  }
}

void await_mbarrier(unsigned address, unsigned parity) {
  const auto ready = [&] {
    const Mbarrier& barrier = find(address);
    if (barrier.phase % 2 == parity && barrier.pending == 0) {
      land_boxes(address);
    }
    return barrier.phase % 2 != parity;
  };
  wait_until(ready, {describe_mbarrier, address, parity});
  for (const auto& [warp, time] : find(address).complete) learn_of_writes(warp, time);
}

void check_published(unsigned mbarrier) {
  if (!find(mbarrier).published) {
    fail("a copy would report on an mbarrier without fence.mbarrier_init, (address)", mbarrier);
  }
}

void complete_bytes(unsigned mbarrier, int bytes) {
  Mbarrier& barrier = find(mbarrier);
  barrier.bytes -= bytes;
  end_phase_if_complete(barrier);
}

void start_barriers() {
  std::fill(std::begin(named), std::end(named), NamedBarrier());
  mbarriers.clear();
}

}  // namespace emulator
