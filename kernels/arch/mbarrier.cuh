// mbarrier (sm_90): barriers in shared memory on which copies report what has arrived.
#pragma once

namespace cupyflash {

/// Its phases are numbered from 0; `parity` of a phase is its number modulo 2.
struct AsyncBarrier {
  unsigned address;  // of 8 bytes of shared memory

  /// A phase ends after `arrivals` of them; by one thread, before `publish_barriers`.
  __device__ void initialise(int arrivals) const {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address), "r"(arrivals)
                 : "memory");
  }
  __device__ void arrive() const {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
  }
  /// Arrives; the phase ends no sooner than copies have brought `bytes`.
  __device__ void arrive_and_expect(int bytes) const {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes)
                 : "memory");
  }
  /// Waits for the end of the phase of this parity, if it is not the one before the present phase.
  /// The warp sleeps for up to 10 ms at a time: asking again and again takes issue slots of others.
  __device__ void wait(unsigned parity) const {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "retry:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, 10000000;\n"
        "@!done bra retry;\n"
        "}\n" ::"r"(address),
        "r"(parity)
        : "memory");
  }
};

/// Lets the copy engine see the barriers that this thread has initialised; then __syncthreads.
__device__ inline void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

}  // namespace cupyflash
