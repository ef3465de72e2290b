// Host version of kernels/arch/shared_memory.cuh, with every access checked.
#pragma once

#include "common/types.cuh"

namespace cupyflash {

template <class T>
T read_shared(unsigned address) {
  T value;
  memcpy(&value, emulator::shared_at(address, sizeof(T)), sizeof(T));
  return value;
}

inline unsigned shared_address(const void* shared) { return emulator::address_of_shared(shared); }

inline void store_shared(unsigned address, unsigned value) {
  memcpy(emulator::shared_at(address, sizeof(value)), &value, sizeof(value));
}

inline void store_shared(unsigned address, unsigned short value) {
  memcpy(emulator::shared_at(address, sizeof(value)), &value, sizeof(value));
}

inline uint4 load_shared(unsigned address) { return read_shared<uint4>(address); }
inline float2 load_shared_pair(unsigned address) { return read_shared<float2>(address); }
inline float load_shared_float(unsigned address) { return read_shared<float>(address); }

}  // namespace cupyflash
