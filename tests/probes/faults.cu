// out += a b by one warpgroup, by way of a copy, stores, a product and a bulk addition; and what
// goes wrong if a step is left out. Operands are without swizzle, k runs through neighbours.
#include "arch/bulk.cuh"
#include "arch/named_barrier.cuh"
#include "arch/shared_memory.cuh"
#include "arch/wgmma.cuh"

namespace cupyflash {

enum class Fault {
  none,
  early_read,
  no_proxy_fence,
  no_register_fence,
  early_write,
  no_product_wait,
  warps_differ,
  arrives_twice,
  waits_twice,
  expects_too_much,
  counts_differ,
  no_bulk_wait,
  early_reuse,
};

struct Params {
  const void* a;      // (64, 16) as in shared memory
  const unsigned* b;  // (64, 16) likewise
  float* out;         // (128 threads, 32)
  Fault fault;
};

constexpr int operand_bytes = 64 * 16 * 2;

__device__ inline uint64 plain_operand(unsigned address) {
  constexpr uint64 next_k = uint64(128 >> 4) << 16, next_rows = uint64(256 >> 4) << 32;
  return next_rows | next_k | uint64(address >> 4);
}

__device__ inline void copy_operands(const Params& params, unsigned a, unsigned b,
                                     AsyncBarrier arrived) {
  const Fault fault = params.fault;
  if (threadIdx.x == 0) {
    arrived.arrive_and_expect(operand_bytes + (fault == Fault::expects_too_much ? 16 : 0));
    copy_bulk(a, params.a, operand_bytes, arrived);
    if (fault == Fault::arrives_twice) arrived.arrive();
  }
  for (int word = threadIdx.x; word < operand_bytes / 4; word += 128) {
    store_shared(b + word * 4, params.b[word]);
  }
  if (fault != Fault::no_proxy_fence) publish_shared();
  if (fault != Fault::early_read) arrived.wait(0);
  if (fault == Fault::waits_twice) arrived.wait(1);
  if (fault == Fault::counts_differ && threadIdx.x >= 64) {
    await_barrier<64>(1);
  } else {
    await_barrier<128>(1);
  }
}

__device__ inline void multiply(float (&sum)[32], unsigned a, unsigned b, Fault fault) {
  if (fault != Fault::no_register_fence) products_see_registers();
  if (fault != Fault::warps_differ || threadIdx.x < 96) {
    SharedProduct<DataType::float16, 64>::multiply(sum, plain_operand(a), plain_operand(b), false);
  }
  commit_products();
  if (fault == Fault::early_write) sum[0] = 1.0f;
  if (fault != Fault::no_product_wait) await_products<0>();
  settle(sum);
}

__device__ inline void add_sums(const Params& params, unsigned staged, const float (&sum)[32]) {
  for (int i = 0; i < 32; ++i) {
    store_shared(staged + (threadIdx.x * 32 + i) * 4, __float_as_uint(sum[i]));
  }
  publish_shared();
  __syncthreads();
  if (threadIdx.x == 0) {
    add_bulk(params.out, staged, 128 * 32 * 4);
    if (params.fault == Fault::no_bulk_wait) return;
    if (params.fault != Fault::early_reuse) await_bulk_reads();
    for (int word = 0; word < 128 * 32; ++word) store_shared(staged + word * 4, 0u);
    publish_shared();
    await_bulk_additions();
  }
}

__device__ inline void run(const Params& params) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const unsigned shared = shared_address(shared_memory);
  const unsigned a = shared + 1024, b = a + operand_bytes, staged = b + operand_bytes;
  const AsyncBarrier arrived = {shared};
  if (threadIdx.x == 0) {
    arrived.initialise(1);
    publish_barriers();
  }
  __syncthreads();
  copy_operands(params, a, b, arrived);
  float sum[32];
  multiply(sum, a, b, params.fault);
  add_sums(params, staged, sum);
}

}  // namespace cupyflash

using namespace cupyflash;

extern "C" __global__ void faulty(const __grid_constant__ Params params) { run(params); }
