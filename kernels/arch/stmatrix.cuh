// stmatrix (sm_90): four 8 x 8 matrices of 16-bit elements, from fragments to shared memory.
#pragma once

namespace cupyflash {

/// Matrix i's rows become the 16 bytes at the addresses of lanes 8 i ... 8 i + 7.
__device__ inline void store_matrices(unsigned address, const unsigned (&fragment)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
               : "memory");
}

}  // namespace cupyflash
