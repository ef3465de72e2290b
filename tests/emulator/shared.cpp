// Shared memory, and which of its words threads have written without a fence for the copy engine.
#include "shared.h"

#include <vector>

#include "runtime.h"

namespace cupyflash {
alignas(1024) thread_local unsigned char shared_memory[1 << 18];
}

namespace emulator {

unsigned shared_bytes;

namespace {

constexpr int word_bytes = 4;
unsigned short writer[sizeof(cupyflash::shared_memory) / word_bytes];  // thread + 1; 0: nobody
std::vector<std::vector<unsigned>> written;                            // words, by thread

}  // namespace

unsigned address_of_shared(const void* pointer) {
  return unsigned(static_cast<const unsigned char*>(pointer) - cupyflash::shared_memory);
}

unsigned char* shared_range(unsigned address, unsigned bytes, unsigned alignment) {
  if (uint64_t(address) + bytes > shared_bytes || address % alignment != 0) {
    fail("bad access to shared memory, (address, bytes)", address, bytes);
  }
  return cupyflash::shared_memory + address;
}

unsigned char* shared_at(unsigned address, unsigned bytes) {
  return shared_range(address, bytes, bytes);
}

void wrote_shared(unsigned address, unsigned bytes) {
  const auto me = static_cast<unsigned short>(thread.x + 1);
  for (unsigned word = address / word_bytes; word * word_bytes < address + bytes; ++word) {
    if (writer[word] != me) {
      writer[word] = me;
      written[thread.x].push_back(word);
    }
  }
}

void fence_proxies() {
  for (unsigned word : written[thread.x]) {
    if (writer[word] == thread.x + 1) {
      writer[word] = 0;
    }
  }
  written[thread.x].clear();
}

void check_asynchronous_read(unsigned address, unsigned bytes) {
  for (unsigned word = address / word_bytes; word * word_bytes < address + bytes; ++word) {
    if (writer[word] != 0) {
      fail("read by the asynchronous proxy what has seen no fence.proxy.async, (address, writer)",
           word * word_bytes, writer[word] - 1);
    }
  }
}

void wrote_asynchronously(unsigned address, unsigned bytes) {
  memset(writer + address / word_bytes, 0, bytes / word_bytes * sizeof(*writer));
}

void start_shared(int threads) {
  memset(cupyflash::shared_memory, 0xff, sizeof(cupyflash::shared_memory));  // NaN
  memset(writer, 0, sizeof(writer));
  written.assign(threads, {});
}

}  // namespace emulator
