// ldmatrix (sm_75): four 8 x 8 matrices of 16-bit elements, from shared memory to fragments.
#pragma once

namespace cupyflash {

/// Matrix i's rows are the 16 bytes at the addresses of lanes 8 i ... 8 i + 7.
__device__ inline void load_matrices(unsigned (&fragment)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(address)
               : "memory");
}

/// The same with each matrix transposed.
__device__ inline void load_matrices_transposed(unsigned (&fragment)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(address)
               : "memory");
}

}  // namespace cupyflash
