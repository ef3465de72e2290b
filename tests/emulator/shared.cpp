// Shared memory, and which of its words threads have written without a fence for the copy engine.
#include "shared.h"

#include <algorithm>
#include <vector>

#include "runtime.h"

namespace cupyflash {
alignas(1024) thread_local unsigned char shared_memory[1 << 18];
}

namespace emulator {

unsigned shared_bytes;

namespace {

constexpr int word_bytes = 4;
constexpr int words = sizeof(cupyflash::shared_memory) / word_bytes;

unsigned short writer[words];  // thread + 1; 0: nobody
unsigned time_of[words];       // of the last write
unsigned now;
std::vector<std::vector<unsigned>> written;  // words, by thread
std::vector<std::vector<unsigned>> known;    // time until which a thread knows a warp's writes

/// What a thread wrote until a time is seen by the asynchronous proxy.
void expose(unsigned by, unsigned until) {
  auto& list = written[by];
  const auto exposed = [&](unsigned word) {
    if (writer[word] != by + 1) return true;
    if (time_of[word] > until) return false;
    writer[word] = 0;
    return true;
  };
  list.erase(std::remove_if(list.begin(), list.end(), exposed), list.end());
}

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
    time_of[word] = now;
  }
  ++now;
}

unsigned write_time() { return now; }

void learn_of_writes(int warp, unsigned until) {
  unsigned& time = known[thread.x][warp];
  time = std::max(time, until);
}

void fence_proxies() {
  expose(thread.x, now);
  for (unsigned by = 0; by < written.size(); ++by) {
    if (const unsigned until = known[thread.x][by / warp_size]; until > 0) expose(by, until - 1);
  }
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
  now = 0;
  written.assign(threads, {});
  known.assign(threads, std::vector<unsigned>(threads / warp_size + 1));
}

}  // namespace emulator
