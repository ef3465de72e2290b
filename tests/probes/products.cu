// One product of a 64 x 16 with a 16 x 128 matrix, both where given descriptors say.
#include "arch/bulk.cuh"
#include "arch/shared_memory.cuh"
#include "arch/wgmma.cuh"

namespace cupyflash {

struct Params {
  const void* image;  // what is put into shared memory
  float* sum;         // (64, 128)
  uint64 a, b;        // descriptors, their addresses counted from the image
  int bytes;          // of the image
};

template <bool a_by_rows, bool b_by_rows>
__device__ void multiply(const Params& params) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const unsigned shared = shared_address(shared_memory);
  const unsigned image = shared + 1024;
  const AsyncBarrier arrived = {shared};
  if (threadIdx.x == 0) {
    arrived.initialise(1);
    publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    arrived.arrive_and_expect(params.bytes);
    copy_bulk(image, params.image, params.bytes, arrived);
  }
  arrived.wait(0);

  float sum[64];
  products_see_registers();
  SharedProduct<DataType::float16, 128>::multiply<a_by_rows, b_by_rows>(
      sum, advance_operand(params.a, image), advance_operand(params.b, image), false);
  commit_products();
  await_products<0>();
  settle(sum);
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, col = threadIdx.x % 4 * 2;
  for (int i = 0; i < 64; ++i) {
    params.sum[(row + (i / 2 % 2) * 8) * 128 + col + i / 4 * 8 + i % 2] = sum[i];
  }
}

}  // namespace cupyflash

using namespace cupyflash;

extern "C" __global__ void product_by_cols_cols(const __grid_constant__ Params params) {
  multiply<false, false>(params);
}
extern "C" __global__ void product_by_cols_rows(const __grid_constant__ Params params) {
  multiply<false, true>(params);
}
extern "C" __global__ void product_by_rows_cols(const __grid_constant__ Params params) {
  multiply<true, false>(params);
}
extern "C" __global__ void product_by_rows_rows(const __grid_constant__ Params params) {
  multiply<true, true>(params);
}
