// One box of an array of four axes, as the copy engine leaves it in shared memory, and back.
#include "arch/bulk.cuh"
#include "arch/shared_memory.cuh"
#include "arch/tma.cuh"

namespace cupyflash {

struct Params {
  TensorMap map;
  uint4* image;  // what the box is in shared memory
  int at[4];     // the box's first element, the axis with neighbours first
  int bytes;     // of the box
};

__device__ inline void copy(const Params& params) {
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
    copy_box(image, params.map, params.at[0], params.at[1], params.at[2], params.at[3], arrived);
  }
  arrived.wait(0);
  for (int chunk = threadIdx.x; chunk < params.bytes / 16; chunk += blockDim.x) {
    params.image[chunk] = load_shared(image + chunk * 16);
  }
}

__device__ inline void store(const Params& params) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const unsigned image = shared_address(shared_memory) + 1024;
  const unsigned* words = reinterpret_cast<const unsigned*>(params.image);
  for (int word = threadIdx.x; word < params.bytes / 4; word += blockDim.x) {
    store_shared(image + word * 4, words[word]);
  }
  publish_shared();
  __syncthreads();
  if (threadIdx.x == 0) {
    store_box(params.map, image, params.at[0], params.at[1], params.at[2], params.at[3]);
    await_bulk_additions();
  }
}

}  // namespace cupyflash

using namespace cupyflash;

extern "C" __global__ void box(const __grid_constant__ Params params) { copy(params); }
extern "C" __global__ void stored_box(const __grid_constant__ Params params) { store(params); }
