// A block's dynamic shared memory by 32-bit address, every access checked.
#pragma once

#include <cstring>

namespace emulator {

extern unsigned shared_bytes;  // of the block that runs

/// Fails if an access is outside or misaligned.
unsigned char* shared_at(unsigned address, unsigned bytes);
unsigned char* shared_range(unsigned address, unsigned bytes, unsigned alignment);
unsigned address_of_shared(const void* pointer);

/// Threads write by the generic proxy, copies and products read by the asynchronous one: in
/// between the thread that wrote must have passed fence.proxy.async, or one that knows of it.
void wrote_shared(unsigned address, unsigned bytes);
void fence_proxies();
/// A time, which grows with every write; and that this thread knows what a warp wrote until then.
unsigned write_time();
void learn_of_writes(int warp, unsigned until);
void check_asynchronous_read(unsigned address, unsigned bytes);
/// What copies have written, or are about to.
void wrote_asynchronously(unsigned address, unsigned bytes);

void start_shared(int threads);

template <class T>
T read_shared(unsigned address) {
  T value;
  memcpy(&value, shared_at(address, sizeof(T)), sizeof(T));
  return value;
}

template <class T>
void write_shared(unsigned address, T value) {
  memcpy(shared_at(address, sizeof(T)), &value, sizeof(T));
  wrote_shared(address, sizeof(T));
}

}  // namespace emulator
