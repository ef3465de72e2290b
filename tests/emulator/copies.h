// Copies that go on while threads do other things; they land as late as they may.
#pragma once

#include <cstdint>

namespace emulator {

/// cp.async: lands when its thread waits for it.
void copy_later(unsigned shared, const void* global, int bytes, bool inside);
void commit_copies();
void await_copies(int pending_groups);

constexpr int most_axes = 5;

/// What device.py writes in place of the driver's CUtensorMap.
struct TensorDescription {
  uint64_t address;
  uint64_t strides[most_axes - 1];  // in bytes, of all axes but the first
  uint32_t lengths[most_axes];
  uint16_t box[most_axes];
  uint8_t rank, element_bytes;
  uint8_t swizzle_bytes;  // 0: none
  uint8_t mark;
  static constexpr uint8_t marked = 0xa7;
};
static_assert(sizeof(TensorDescription) <= 128);

/// cp.async.bulk.tensor to shared memory: NaN from here on, lands when somebody waits for
/// `mbarrier`.
void copy_box_later(unsigned shared, const void* map, const int* at, int rank, unsigned mbarrier);
/// cp.async.bulk to shared memory: a box of one axis.
void copy_bulk_later(unsigned shared, const void* global, int bytes, unsigned mbarrier);
void land_boxes(unsigned mbarrier);

/// cp.async.bulk.tensor from shared memory, and cp.reduce.async.bulk (addition of float32): shared
/// memory is read when its thread waits for that, global memory written when it waits for all.
void store_box_later(const void* map, unsigned shared, const int* at, int rank);
void add_bulk_later(float* global, unsigned shared, int bytes);
void commit_bulk();
void await_bulk_read(int pending_groups);
void await_bulk(int pending_groups);

void start_copies(int threads);
void end_copies_of_thread();
void end_copies();

}  // namespace emulator
