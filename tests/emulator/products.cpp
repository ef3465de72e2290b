// When products run: a warp's part of each is computed where the warp waits for it, in order.
#include "products.h"

#include <deque>
#include <list>
#include <vector>

#include "multiply.h"
#include "runtime.h"

namespace emulator {
namespace {

constexpr int warps_of_group = 4;
constexpr unsigned poison = 0x7fc0bad0;  // NaN: what registers hold while products are under way

/// Sums of a warp that products under way will write.
struct Accumulator {
  float* registers[warp_size] = {};
  int n;
  int under_way = 0;  // products
  Sums sums;
};

struct Product {
  Operation operation;
  Accumulator* target;
  Fragments fragments;
  int lanes = 0;  // that have issued it
  unsigned group;
};

struct Warp {
  std::deque<Product> under_way;
  unsigned finished = 0;  // number of the first one under way
  std::list<Accumulator> accumulators;
};

struct Lane {
  unsigned started = 0;  // products
  unsigned groups = 0;   // committed
  bool fenced = false;
};

std::vector<Lane> lanes;
std::vector<Warp> warps;
std::vector<std::vector<Operation>> started;  // by warpgroup

Warp& my_warp() { return warps[warp()]; }
Lane& my_lane() { return lanes[thread.x]; }

/// Where element i of a lane's registers stands in its warp's 16 rows.
int row_of(int lane, int i) { return lane / 4 + 8 * (i >> 1 & 1); }
int col_of(int lane, int i) { return i / 4 * 8 + lane % 4 * 2 + (i & 1); }

bool overlap(const float* a, int a_n, const float* b, int b_n) {
  return a < b + b_n / 2 && b < a + a_n / 2;
}

Accumulator* find_accumulator(const float* sum, int n) {
  for (Accumulator& accumulator : my_warp().accumulators) {
    const float* registers = accumulator.registers[lane()];
    if (registers == sum && accumulator.n == n) {
      return &accumulator;
    }
    if (registers != nullptr && overlap(registers, accumulator.n, sum, n)) {
      fail("products under way share a part of their sums, (widths)", n, accumulator.n);
    }
  }
  return nullptr;
}

/// Takes a lane's part of the sums; the registers are the products' from here on.
void take_over(Accumulator& accumulator, float* sum) {
  accumulator.registers[lane()] = sum;
  for (int i = 0; i < accumulator.n / 2; ++i) {
    accumulator.sums.at[row_of(lane(), i)][col_of(lane(), i)] = sum[i];
    memcpy(&sum[i], &poison, sizeof(poison));
  }
}

void give_back(const Accumulator& accumulator) {
  for (int of_lane = 0; of_lane < warp_size; ++of_lane) {
    float* sum = accumulator.registers[of_lane];
    for (int i = 0; i < accumulator.n / 2; ++i) {
      if (memcmp(&sum[i], &poison, sizeof(poison)) != 0) {
        fail("sums were written while products were under way, (lane, register)", of_lane, i);
      }
      sum[i] = accumulator.sums.at[row_of(of_lane, i)][col_of(of_lane, i)];
    }
  }
}

/// The lane's next product, which its first lane has begun.
Product& next_product(const Operation& operation, float* sum) {
  Warp& warp = my_warp();
  const unsigned index = my_lane().started++ - warp.finished;
  if (index == warp.under_way.size()) {
    Accumulator* target = find_accumulator(sum, operation.n);
    if (target == nullptr) {
      target = &warp.accumulators.emplace_back();
      target->n = operation.n;
    }
    ++target->under_way;
    warp.under_way.push_back({operation, target});
    warp.under_way.back().group = my_lane().groups;
  }
  return warp.under_way[index];
}

/// All warps of a warpgroup ask for the same products.
void compare_with_warpgroup(const Operation& operation, unsigned number) {
  auto& operations = started[warp() / warps_of_group];
  if (number == operations.size()) {
    operations.push_back(operation);
  } else if (!(operations[number] == operation)) {
    fail("warps of a warpgroup ask for different products, (warp, product)", warp(), number);
  }
}

void finish(Warp& warp) {
  const Product& product = warp.under_way.front();
  Accumulator& target = *product.target;
  multiply(target.sums, product.operation, product.fragments, emulator::warp() % warps_of_group);
  if (--target.under_way == 0) {
    give_back(target);
    warp.accumulators.remove_if([&](const Accumulator& other) { return &other == &target; });
  }
  warp.under_way.pop_front();
  ++warp.finished;
}

/// How many products the warp has committed, but for those of the last groups.
unsigned committed_but(int pending_groups) {
  const Warp& warp = my_warp();
  unsigned number = warp.finished;
  for (const Product& product : warp.under_way) {
    number += int(product.group) < int(my_lane().groups) - pending_groups;
  }
  return number;
}

bool all_warps_started(unsigned products) {
  const int first = warp() / warps_of_group * warps_of_group;
  for (int other = first; other < first + warps_of_group; ++other) {
    if (warps[other].finished + warps[other].under_way.size() < products) {
      return false;
    }
  }
  return true;
}

std::string describe_products(long long number, long long) {
  return "other warps of its warpgroup to start product " + std::to_string(number);
}

}  // namespace

void start_product(const Operation& operation, float* sum, const unsigned* fragment) {
  if (!my_lane().fenced) {
    fail("no wgmma.fence between a wait, or the start, and a product");
  }
  compare_with_warpgroup(operation, my_lane().started);
  Product& product = next_product(operation, sum);
  if (product.target->registers[lane()] == nullptr) {
    take_over(*product.target, sum);
  }
  if (product.target->registers[lane()] != sum || product.group != my_lane().groups) {
    fail("lanes of a warp differ in the sums or groups of a product");
  }
  if (fragment != nullptr) {
    memcpy(product.fragments.at[lane()], fragment, sizeof(product.fragments.at[0]));
  }
  ++product.lanes;
}

void fence_registers() { my_lane().fenced = true; }

void commit_products() { ++my_lane().groups; }

void await_products(int pending_groups) {
  await_warp();
  const unsigned number = committed_but(pending_groups);
  if (number > my_warp().finished) {
    wait_until([=] { return all_warps_started(number); }, {describe_products, number});
    step_aside();
  }
  // The first lane that comes here does it for all: none is beyond its wait.
  Warp& warp = my_warp();
  while (int(number - warp.finished) > 0) {
    if (warp.under_way.front().lanes != warp_size) {
      fail("not all lanes of a warp have started a product, (warp)", emulator::warp());
    }
    finish(warp);
  }
  my_lane().fenced = false;
}

void start_products(int threads) {
  lanes.assign(threads, Lane());
  warps.clear();
  warps.resize(threads / warp_size);
  started.assign(threads / warp_size / warps_of_group + 1, {});
}

void end_products() {
  for (int warp = 0; warp < int(warps.size()); ++warp) {
    if (!warps[warp].under_way.empty()) {
      complain("a warp ended with products under way, (warp, products)", warp,
               warps[warp].under_way.size());
    }
    if (warps[warp].finished != started[warp / warps_of_group].size()) {
      complain("warps of a warpgroup ended with different numbers of products, (warp)", warp);
    }
  }
}

}  // namespace emulator
