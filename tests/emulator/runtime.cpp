// A block's threads as fibers: one runs until it waits for others, then the next takes over.
#include "runtime.h"

#include <deque>
#include <vector>

namespace cupyflash {
alignas(1024) thread_local unsigned char shared_memory[1 << 18];
}

namespace emulator {

Index thread, block, block_size, grid_size;
unsigned shared_bytes;

namespace {

using Kernel = void (*)(const void*);

struct Copy {
  unsigned shared;
  const void* global;
  int bytes;
  bool inside;
};

struct Fiber {
  void* stack_pointer = nullptr;
  bool finished = false;
  const char* waits_for = "nothing";
  std::vector<Copy> copies;              // not yet committed
  std::deque<std::vector<Copy>> groups;  // committed, not yet waited for
  unsigned exchanges = 0;
};

/// Two sets of slots by turns: a fast lane may start the next exchange while others still read.
struct Warp {
  int arrived = 0;
  unsigned phase = 0;
  alignas(16) unsigned char slots[2][warp_size * slot_bytes];
};

struct BlockBarrier {
  int arrived = 0;
  int threads = 0;  // that have not finished
  unsigned phase = 0;
  int votes[2] = {0, 0};  // by the parity of the phase
};

constexpr size_t stack_bytes = 256 << 10;

std::vector<Fiber> fibers;
std::vector<Warp> warps;
std::vector<char*> stacks;
BlockBarrier barrier;
bool progress;  // whether any thread has got anywhere since the scheduler last asked
void* scheduler_stack_pointer;
Kernel kernel;
const void* kernel_params;

extern "C" void emulator_switch(void** save_to, void* stack_pointer);
// Saves the registers that a call must preserve (System V, x86-64) and takes another stack.
asm(R"(
.text
.globl emulator_switch
.hidden emulator_switch
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
constexpr int saved_registers = 6;

Fiber& self() { return fibers[thread.x]; }

void let_others_run() { emulator_switch(&self().stack_pointer, scheduler_stack_pointer); }

/// A block's shared memory is another's once it has ended: copies must have landed by then.
void require_landed(const Fiber& fiber) {
  bool pending = !fiber.copies.empty();
  for (const auto& group : fiber.groups) {
    pending = pending || !group.empty();
  }
  if (pending) {
    fail("a thread ends before its cp.async has landed, (block, thread)", block.x, thread.x);
  }
}

void run_kernel() {
  kernel(kernel_params);
  require_landed(self());
  self().finished = true;
  progress = true;
  let_others_run();
}

void end_phase() {
  barrier.arrived = 0;
  ++barrier.phase;
  barrier.votes[barrier.phase % 2] = 0;
}

/// A stack as `emulator_switch` leaves it, about to return into `run_kernel`.
void* new_stack(char* memory) {
  void** top = reinterpret_cast<void**>(memory + stack_bytes - 64);
  *--top = nullptr;  // run_kernel's return address: keeps the stack aligned, is never taken
  *--top = reinterpret_cast<void*>(run_kernel);
  for (int i = 0; i < saved_registers; ++i) {
    *--top = nullptr;
  }
  return top;
}

void start_block(int number, int threads) {
  block = {unsigned(number), 0, 0};
  memset(cupyflash::shared_memory, 0xff, sizeof(cupyflash::shared_memory));  // NaN
  fibers.assign(threads, Fiber());
  warps.assign(threads / warp_size, Warp());
  barrier = BlockBarrier();
  barrier.threads = threads;
  for (int t = 0; t < threads; ++t) {
    if (t == int(stacks.size())) {
      stacks.push_back(static_cast<char*>(aligned_alloc(64, stack_bytes)));
    }
    fibers[t].stack_pointer = new_stack(stacks[t]);
  }
}

void resume(int t) {
  thread = {unsigned(t), 0, 0};
  emulator_switch(&scheduler_stack_pointer, fibers[t].stack_pointer);
  if (fibers[t].finished && --barrier.threads > 0 && barrier.arrived == barrier.threads) {
    end_phase();  // those that wait do so for threads that have not finished
  }
}

/// Runs a warp until it waits for the block; returns whether it got anywhere.
bool run_warp(int warp) {
  bool any = false;
  do {
    progress = false;
    for (int t = warp * warp_size; t < (warp + 1) * warp_size; ++t) {
      if (!fibers[t].finished) {
        resume(t);
      }
    }
    any = any || progress;
  } while (progress);
  return any;
}

bool run_block() {
  while (barrier.threads > 0) {
    bool any = false;
    for (int warp = 0; warp < int(warps.size()); ++warp) {
      any = run_warp(warp) || any;
    }
    if (!any) {
      return false;
    }
  }
  return true;
}

void report_deadlock() {
  fprintf(stderr, "block %u waits for ever:", block.x);
  for (int t = 0; t < int(fibers.size()); ++t) {
    if (!fibers[t].finished) {
      fprintf(stderr, " %d for %s", t, fibers[t].waits_for);
    }
  }
  fprintf(stderr, "\n");
}

void land(const Copy& copy) {
  unsigned char* target = shared_at(copy.shared, copy.bytes);
  if (!copy.inside) {
    memset(target, 0, copy.bytes);
    return;
  }
  if (reinterpret_cast<uintptr_t>(copy.global) % copy.bytes != 0) {
    fail("misaligned cp.async of (bytes, thread)", copy.bytes, thread.x);
  }
  memcpy(target, copy.global, copy.bytes);
}

void arrive_at_block(const char* waits_for) {
  self().waits_for = waits_for;
  progress = true;
  const unsigned phase = barrier.phase;
  if (++barrier.arrived == barrier.threads) {
    end_phase();
  }
  while (barrier.phase == phase) {
    let_others_run();
  }
}

}  // namespace

void fail(const char* what, long long first, long long second) {
  fprintf(stderr, "emulated kernel: %s: %lld, %lld\n", what, first, second);
  abort();
}

unsigned address_of_shared(const void* pointer) {
  return unsigned(static_cast<const unsigned char*>(pointer) - cupyflash::shared_memory);
}

unsigned char* shared_at(unsigned address, unsigned bytes) {
  if (uint64_t(address) + bytes > shared_bytes || address % bytes != 0) {
    fail("bad access to shared memory, (address, bytes)", address, bytes);
  }
  return cupyflash::shared_memory + address;
}

void await_block() { arrive_at_block("__syncthreads"); }

int await_block_or(int value) {
  const unsigned parity = barrier.phase % 2;
  barrier.votes[parity] |= value != 0;
  arrive_at_block("__syncthreads_or");
  return barrier.votes[parity];
}

const unsigned char* exchange(const void* data, int bytes) {
  Fiber& fiber = self();
  Warp& warp = warps[thread.x / warp_size];
  unsigned char* slots = warp.slots[fiber.exchanges++ % 2];
  memcpy(slots + lane() * slot_bytes, data, bytes);
  fiber.waits_for = "its warp";
  progress = true;
  const unsigned phase = warp.phase;
  if (++warp.arrived == warp_size) {
    warp.arrived = 0;
    ++warp.phase;
  }
  while (warp.phase == phase) {
    let_others_run();
  }
  return slots;
}

void copy_later(unsigned shared, const void* global, int bytes, bool inside) {
  self().copies.push_back({shared, global, bytes, inside});
}

void commit_copies() {
  self().groups.push_back(std::move(self().copies));
  self().copies.clear();
}

void await_copies(int pending_groups) {
  auto& groups = self().groups;
  while (int(groups.size()) > pending_groups) {
    for (const Copy& copy : groups.front()) {
      land(copy);
    }
    groups.pop_front();
  }
}

}  // namespace emulator

/// Runs a grid, block after block; false if threads wait for ever.
extern "C" bool emulator_launch(emulator::Kernel function, int blocks, int threads,
                                int shared_bytes, const void* params) {
  using namespace emulator;
  kernel = function;
  kernel_params = params;
  emulator::shared_bytes = unsigned(shared_bytes);
  block_size = {unsigned(threads), 1, 1};
  grid_size = {unsigned(blocks), 1, 1};
  for (int number = 0; number < blocks; ++number) {
    start_block(number, threads);
    if (!run_block()) {
      report_deadlock();
      return false;
    }
  }
  return true;
}
