// A block's threads as fibers: one runs until it waits for others, then the next takes over.
#include "runtime.h"

#include <vector>

#include "barriers.h"
#include "copies.h"
#include "products.h"
#include "shared.h"

namespace emulator {

Index thread, block, block_size, grid_size;

namespace {

using Kernel = void (*)(const void*);

struct Fiber {
  void* stack_pointer = nullptr;
  bool finished = false;
  Reason waits_for = {};
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
bool progress;          // whether any thread has got anywhere since the scheduler last asked
bool stepped_aside;     // whether any waits for the next round
unsigned rounds;        // of the scheduler over all warps
bool in_thread;         // or in the scheduler
std::string complaint;  // ends the launch
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

void run_kernel() {
  kernel(kernel_params);
  end_copies_of_thread();
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
  fibers.assign(threads, Fiber());
  warps.assign(threads / warp_size, Warp());
  barrier = BlockBarrier();
  barrier.threads = threads;
  start_shared(threads);
  start_barriers();
  start_copies(threads);
  start_products(threads);
  for (int t = 0; t < threads; ++t) {
    if (t == int(stacks.size())) {
      stacks.push_back(static_cast<char*>(aligned_alloc(64, stack_bytes)));
    }
    fibers[t].stack_pointer = new_stack(stacks[t]);
  }
}

void resume(int t) {
  thread = {unsigned(t), 0, 0};
  in_thread = true;
  emulator_switch(&scheduler_stack_pointer, fibers[t].stack_pointer);
  in_thread = false;
  if (fibers[t].finished && --barrier.threads > 0 && barrier.arrived == barrier.threads) {
    end_phase();  // those that wait do so for threads that have not finished
  }
}

/// Runs a warp until it waits for others; returns whether it got anywhere.
bool run_warp(int warp) {
  bool any = false;
  do {
    progress = false;
    for (int t = warp * warp_size; t < (warp + 1) * warp_size && complaint.empty(); ++t) {
      if (!fibers[t].finished) {
        resume(t);
      }
    }
    any = any || progress;
  } while (progress && complaint.empty());
  return any;
}

void report_deadlock() {
  complaint = "block " + std::to_string(block.x) + " waits for ever:";
  std::string before;
  for (int t = 0; t < int(fibers.size()); ++t) {
    if (fibers[t].finished) {
      continue;
    }
    const Reason& reason = fibers[t].waits_for;
    const std::string now = reason.describe(reason.first, reason.second);
    if (now != before) {
      complaint += " from thread " + std::to_string(t) + " on for " + now + ";";
    }
    before = now;
  }
}

void run_block() {
  while (barrier.threads > 0 && complaint.empty()) {
    bool any = false;
    ++rounds;
    stepped_aside = false;
    // Every other block runs its last warps first: what others wait for comes early or late.
    const int count = int(warps.size());
    for (int i = 0; i < count; ++i) {
      any = run_warp(block.x % 2 == 0 ? i : count - 1 - i) || any;
    }
    if (!any && !stepped_aside && complaint.empty()) {
      report_deadlock();
    }
  }
  if (complaint.empty()) {
    end_copies();
    end_products();
  }
}

std::string describe_block(long long, long long) { return "__syncthreads"; }
std::string describe_warp(long long, long long) { return "its warp"; }
std::string describe_others(long long, long long) { return "others to go first"; }

void arrive_at_block() {
  const unsigned phase = barrier.phase;
  if (++barrier.arrived == barrier.threads) {
    end_phase();
  }
  note_progress();
  wait_until([=] { return barrier.phase != phase; }, {describe_block});
}

}  // namespace

void let_others_run() { emulator_switch(&self().stack_pointer, scheduler_stack_pointer); }

void begin_to_wait(Reason reason) { self().waits_for = reason; }

void note_progress() { progress = true; }

void step_aside() {
  const unsigned round = rounds;
  const auto ready = [=] {
    stepped_aside = true;
    return rounds != round;
  };
  wait_until(ready, {describe_others});
}

void note_complaint(const char* what, std::initializer_list<long long> values) {
  if (!complaint.empty()) {
    return;
  }
  complaint = "block " + std::to_string(block.x);
  if (in_thread) {
    complaint += ", thread " + std::to_string(thread.x);
  }
  complaint += std::string(": ") + what;
  for (long long value : values) {
    complaint += " " + std::to_string(value);
  }
}

void abandon() {
  let_others_run();  // a thread that complains is not resumed
  abort();
}

void await_block() { arrive_at_block(); }

unsigned block_phase() { return barrier.phase; }

int await_block_or(int value) {
  const unsigned parity = barrier.phase % 2;
  barrier.votes[parity] |= value != 0;
  arrive_at_block();
  return barrier.votes[parity];
}

const unsigned char* exchange(const void* data, int bytes) {
  Warp& warp = warps[thread.x / warp_size];
  unsigned char* slots = warp.slots[self().exchanges++ % 2];
  memcpy(slots + lane() * slot_bytes, data, bytes);
  const unsigned phase = warp.phase;
  if (++warp.arrived == warp_size) {
    warp.arrived = 0;
    ++warp.phase;
  }
  note_progress();
  wait_until([&] { return warp.phase != phase; }, {describe_warp});
  return slots;
}

}  // namespace emulator

/// Runs a grid, block after block; returns what went wrong, or null.
extern "C" const char* emulator_launch(emulator::Kernel function, int blocks, int threads,
                                       int shared_bytes, const void* params) {
  using namespace emulator;
  kernel = function;
  kernel_params = params;
  emulator::shared_bytes = unsigned(shared_bytes);
  block_size = {unsigned(threads), 1, 1};
  grid_size = {unsigned(blocks), 1, 1};
  complaint.clear();
  for (int number = 0; number < blocks && complaint.empty(); ++number) {
    start_block(number, threads);
    run_block();
  }
  return complaint.empty() ? nullptr : complaint.c_str();
}
