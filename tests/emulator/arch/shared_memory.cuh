// Host version of kernels/arch/shared_memory.cuh, with every access checked.
#pragma once

#include "common/types.cuh"

namespace cupyflash {

inline unsigned shared_address(const void* shared) { return emulator::address_of_shared(shared); }

inline void store_shared(unsigned address, unsigned value) {
  emulator::write_shared(address, value);
}
inline void store_shared(unsigned address, unsigned short value) {
  emulator::write_shared(address, value);
}
inline void store_shared(unsigned address, uint8 value) { emulator::write_shared(address, value); }
inline void store_shared(unsigned address, float4 value) { emulator::write_shared(address, value); }

inline uint4 load_shared(unsigned address) { return emulator::read_shared<uint4>(address); }
inline uint2 load_shared_words(unsigned address) { return emulator::read_shared<uint2>(address); }
inline float2 load_shared_pair(unsigned address) { return emulator::read_shared<float2>(address); }
inline float load_shared_float(unsigned address) { return emulator::read_shared<float>(address); }
inline float4 load_shared_quad(unsigned address) { return emulator::read_shared<float4>(address); }

}  // namespace cupyflash
