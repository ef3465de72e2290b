// cp.async, the copy engine's boxes, and bulk copies to global memory.
#include "copies.h"

#include <deque>
#include <map>
#include <vector>

#include "barriers.h"
#include "runtime.h"
#include "shared.h"

namespace emulator {
namespace {

struct Copy {
  unsigned shared;
  const void* global;
  int bytes;
  bool inside;
};

struct BoxCopy {
  unsigned shared;
  TensorDescription map = {};
  int at[most_axes] = {};
};

/// To where `box` lies in an array, or, where its map has no axes, additions to `sums`.
struct BulkStore {
  BoxCopy box;
  float* sums;
  int bytes;
  std::vector<unsigned char> data;  // what was in shared memory, once it was read
};

/// What one thread has asked for.
struct Copies {
  std::vector<Copy> open;  // not yet committed
  std::deque<std::vector<Copy>> groups;
  std::vector<BulkStore> open_stores;
  std::deque<std::vector<BulkStore>> store_groups;
};

constexpr unsigned chunk_bytes = 16;  // that swizzles permute
constexpr unsigned box_alignment = 128;

std::vector<Copies> copies;
std::map<unsigned, std::vector<BoxCopy>> boxes;  // by mbarrier

Copies& mine() { return copies[thread.x]; }

void land(const Copy& copy) {
  unsigned char* target = shared_at(copy.shared, copy.bytes);
  wrote_shared(copy.shared, copy.bytes);
  if (!copy.inside) {
    memset(target, 0, copy.bytes);
    return;
  }
  if (reinterpret_cast<uintptr_t>(copy.global) % copy.bytes != 0) {
    fail("misaligned cp.async of (bytes, thread)", copy.bytes, thread.x);
  }
  memcpy(target, copy.global, copy.bytes);
}

// --- boxes of arrays -----------------------------------------------------------------------------

unsigned row_bytes(const TensorDescription& map) { return map.box[0] * map.element_bytes; }

unsigned rows(const TensorDescription& map) {
  unsigned count = 1;
  for (int axis = 1; axis < map.rank; ++axis) {
    count *= map.box[axis];
  }
  return count;
}

/// The permutation of chunks takes address bits 7 to 9 and changes bits 4 to 6, or fewer.
unsigned swizzled(unsigned address, unsigned swizzle_bytes) {
  const unsigned chunks = swizzle_bytes / chunk_bytes;
  return chunks == 0 ? address : address ^ (address >> 7 & (chunks - 1)) << 4;
}

/// The part of a row of a box that its array has: where it begins in the array and, in bytes, in
/// the row, and how long it is.
struct RowPart {
  unsigned char* array;
  long long offset;
  long long bytes;
};

RowPart part_of_row(const BoxCopy& copy, unsigned number) {
  const TensorDescription& map = copy.map;
  unsigned char* array = reinterpret_cast<unsigned char*>(map.address);
  for (int axis = 1; axis < map.rank; ++axis) {
    const long long index = copy.at[axis] + long(number % map.box[axis]);
    number /= map.box[axis];
    if (index < 0 || index >= map.lengths[axis]) {
      return {nullptr, 0, 0};
    }
    array += index * int64_t(map.strides[axis - 1]);
  }
  const long long begin = std::max(copy.at[0], 0);
  const long long end = std::min<long long>(copy.at[0] + map.box[0], map.lengths[0]);
  const int size = map.element_bytes;
  return {array + begin * size, (begin - copy.at[0]) * size, std::max(0ll, end - begin) * size};
}

/// Reads a row of a box, zeros outside the array.
void read_row(std::vector<unsigned char>& row, const BoxCopy& copy, unsigned number) {
  std::fill(row.begin(), row.end(), 0);
  const RowPart part = part_of_row(copy, number);
  if (part.bytes > 0) {
    memcpy(row.data() + part.offset, part.array, part.bytes);
  }
}

void land(const BoxCopy& copy) {
  std::vector<unsigned char> row(row_bytes(copy.map));
  for (unsigned number = 0; number < rows(copy.map); ++number) {
    read_row(row, copy, number);
    for (unsigned byte = 0; byte < row.size(); byte += chunk_bytes) {
      const unsigned address = copy.shared + number * unsigned(row.size()) + byte;
      memcpy(shared_at(swizzled(address, copy.map.swizzle_bytes), chunk_bytes), &row[byte],
             chunk_bytes);
    }
  }
}

/// From here on the target is not to be read.
void start(const BoxCopy& copy, unsigned alignment, unsigned mbarrier) {
  if (copy.map.address % chunk_bytes != 0) {
    fail("a copy from a misaligned array, (address)", copy.map.address);
  }
  check_published(mbarrier);
  const unsigned bytes = rows(copy.map) * row_bytes(copy.map);
  memset(shared_range(copy.shared, bytes, alignment), 0xff, bytes);
  wrote_asynchronously(copy.shared, bytes);
  boxes[mbarrier].push_back(copy);
  note_progress();
}

// --- bulk stores ---------------------------------------------------------------------------------

void read_source(BulkStore& store) {
  if (store.data.empty()) {
    const unsigned char* source = shared_range(store.box.shared, store.bytes, chunk_bytes);
    check_asynchronous_read(store.box.shared, store.bytes);
    store.data.assign(source, source + store.bytes);
  }
}

void write_box(const BulkStore& store) {
  const BoxCopy& box = store.box;
  std::vector<unsigned char> row(row_bytes(box.map));
  for (unsigned number = 0; number < rows(box.map); ++number) {
    for (unsigned byte = 0; byte < row.size(); byte += chunk_bytes) {
      const unsigned address = box.shared + number * unsigned(row.size()) + byte;
      memcpy(&row[byte], &store.data[swizzled(address, box.map.swizzle_bytes) - box.shared],
             chunk_bytes);
    }
    const RowPart part = part_of_row(box, number);
    if (part.bytes > 0) {
      memcpy(part.array, row.data() + part.offset, part.bytes);
    }
  }
}

void write_target(const BulkStore& store) {
  if (store.box.map.rank > 0) {
    write_box(store);
    return;
  }
  const float* values = reinterpret_cast<const float*>(store.data.data());
  for (int i = 0; i < store.bytes / int(sizeof(float)); ++i) {
    store.sums[i] += values[i];
  }
}

/// Checks what is asked for, and returns it.
BoxCopy box_of(unsigned shared, const void* map, const int* at, int rank) {
  BoxCopy copy = {.shared = shared};
  memcpy(&copy.map, map, sizeof(copy.map));
  if (copy.map.mark != TensorDescription::marked || copy.map.rank != rank) {
    fail("a tensor map of other rank, or none, (rank, expected)", copy.map.rank, rank);
  }
  std::copy(at, at + rank, copy.at);
  if (at[0] * copy.map.element_bytes % int(chunk_bytes) != 0) {
    fail("a box begins between chunks of 16 bytes of its rows, (element)", at[0]);
  }
  return copy;
}

}  // namespace

void copy_later(unsigned shared, const void* global, int bytes, bool inside) {
  mine().open.push_back({shared, global, bytes, inside});
}

void commit_copies() {
  mine().groups.push_back(std::move(mine().open));
  mine().open.clear();
}

void await_copies(int pending_groups) {
  auto& groups = mine().groups;
  while (int(groups.size()) > pending_groups) {
    for (const Copy& copy : groups.front()) {
      land(copy);
    }
    groups.pop_front();
  }
}

void copy_box_later(unsigned shared, const void* map, const int* at, int rank, unsigned mbarrier) {
  start(box_of(shared, map, at, rank), box_alignment, mbarrier);
}

void copy_bulk_later(unsigned shared, const void* global, int bytes, unsigned mbarrier) {
  if (bytes <= 0 || bytes % chunk_bytes != 0) {
    fail("bulk copies have multiples of 16 bytes, (bytes)", bytes);
  }
  BoxCopy copy = {.shared = shared};
  copy.map.address = reinterpret_cast<uintptr_t>(global);
  copy.map.rank = 1;
  copy.map.element_bytes = chunk_bytes;
  copy.map.lengths[0] = copy.map.box[0] = bytes / chunk_bytes;
  start(copy, chunk_bytes, mbarrier);
}

void land_boxes(unsigned mbarrier) {
  std::vector<BoxCopy> landing;
  std::swap(landing, boxes[mbarrier]);
  for (const BoxCopy& copy : landing) {
    land(copy);
    complete_bytes(mbarrier, int(rows(copy.map) * row_bytes(copy.map)));
  }
}

void store_box_later(const void* map, unsigned shared, const int* at, int rank) {
  const BoxCopy box = box_of(shared, map, at, rank);
  if (box.map.address % chunk_bytes != 0) {
    fail("a copy to a misaligned array, (address)", box.map.address);
  }
  const int bytes = int(rows(box.map) * row_bytes(box.map));
  shared_range(shared, bytes, box_alignment);
  mine().open_stores.push_back({box, nullptr, bytes, {}});
}

void add_bulk_later(float* global, unsigned shared, int bytes) {
  if (reinterpret_cast<uintptr_t>(global) % chunk_bytes != 0 || bytes % chunk_bytes != 0 ||
      bytes <= 0) {
    fail("a misaligned bulk copy, (address, bytes)", reinterpret_cast<intptr_t>(global), bytes);
  }
  shared_range(shared, bytes, chunk_bytes);
  mine().open_stores.push_back({{.shared = shared}, global, bytes, {}});
}

void commit_bulk() {
  mine().store_groups.push_back(std::move(mine().open_stores));
  mine().open_stores.clear();
}

void await_bulk_read(int pending_groups) {
  step_aside();
  auto& groups = mine().store_groups;
  for (int group = 0; group < int(groups.size()) - pending_groups; ++group) {
    for (BulkStore& store : groups[group]) {
      read_source(store);
    }
  }
}

void await_bulk(int pending_groups) {
  await_bulk_read(pending_groups);
  auto& groups = mine().store_groups;
  while (int(groups.size()) > pending_groups) {
    for (const BulkStore& store : groups.front()) {
      write_target(store);
    }
    groups.pop_front();
  }
}

void start_copies(int threads) {
  copies.assign(threads, Copies());
  boxes.clear();
}

void end_copies_of_thread() {
  bool under_way = !mine().open.empty();
  for (const auto& group : mine().groups) {
    under_way = under_way || !group.empty();
  }
  if (under_way) {
    fail("a thread ended before its cp.async had landed");
  }
  if (!mine().open_stores.empty()) {
    fail("a thread ended without having committed its bulk copies");
  }
  for (const auto& group : mine().store_groups) {
    for (const BulkStore& store : group) {
      if (store.data.empty()) {
        fail("a thread ended while a bulk copy could still read shared memory at",
             store.box.shared);
      }
      write_target(store);
    }
  }
}

void end_copies() {
  for (const auto& [mbarrier, landing] : boxes) {
    if (!landing.empty()) {
      complain("a block ended before boxes had landed, (mbarrier, boxes)", mbarrier,
               landing.size());
    }
  }
}

}  // namespace emulator
