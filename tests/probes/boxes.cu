// One box of an array of four axes in shared memory, as the copy engine leaves it there.
#include "arch/shared_memory.cuh"
#include "arch/tma.cuh"

namespace cupyflash {

struct Params {
  TensorMap map;
  uint4* image;  // what the box becomes in shared memory
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

}  // namespace cupyflash

using namespace cupyflash;

extern "C" __global__ void box(const __grid_constant__ Params params) { copy(params); }
