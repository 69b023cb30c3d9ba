// Barriers of Hopper kernels: mbarriers in shared memory, which count arrivals and the bytes of
// bulk copies, a ring of them, and named barriers of a block's threads.
//
// A barrier's phase ends when all expected arrivals have come and all expected bytes have landed.
// Waiting for parity p returns when the phase with that parity has ended; a new barrier answers for
// parity 1 at once, as if a phase before the first had ended.
#pragma once

#include <cstdint>
#include <cstdio>

#include "cuda/kernels/tensor_core.cuh"

namespace ladon::cuda::hopper {

class Barrier {
 public:
  __device__ __forceinline__ void init(int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(arrivals)
                 : "memory");
  }
  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
  }
  /// Arrives, and lets the phase wait for so many bytes of copies too.
  __device__ __forceinline__ void arrive_expecting(int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()),
                 "r"(bytes)
                 : "memory");
  }
  __device__ __forceinline__ void wait(unsigned parity) {
#ifdef NDEBUG
    while (!try_wait(parity)) {
    }
#else
    // An arrival that never comes would hang the GPU: debug builds end the kernel instead.
    for (unsigned tries = 0; !try_wait(parity); ++tries) {
      constexpr unsigned kMostTries = 1U << 24;
      if (tries < kMostTries) continue;
      printf("block %u, thread %u: waits in vain for parity %u of the barrier at %u\n", blockIdx.x,
             threadIdx.x, parity, address());
      __trap();
    }
#endif
  }
  /// Whether the wait would return at once; the same answer for all threads of a warp.
  __device__ __forceinline__ bool has_ended(unsigned parity) {
    unsigned done;
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}"
        : "=r"(done)
        : "r"(address()), "r"(parity)
        : "memory");
    return __all_sync(0xffffffffU, done != 0);
  }
  __device__ __forceinline__ std::uint32_t address() const { return shared_address(&word_); }

 private:
  __device__ __forceinline__ bool try_wait(unsigned parity) {
    unsigned done;
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}"
        : "=r"(done)
        : "r"(address()), "r"(parity)
        : "memory");
    return done != 0;
  }

  std::uint64_t word_;
};

/// Makes new barriers known to the copy engine; then the block's threads may synchronise.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// One buffer: `full` when it has been filled, `empty` when all its readers are done.
struct BufferBarriers {
  Barrier full;
  Barrier empty;
};

/// Which buffer of a ring comes next, and the parity of its phase.
template <int kStages>
class RingPosition {
 public:
  __device__ __forceinline__ int stage() const { return stage_; }
  __device__ __forceinline__ unsigned filled() const { return parity_; }
  __device__ __forceinline__ unsigned emptied() const { return parity_ ^ 1U; }
  /// Tells the compiler that all threads of the warp have the same position.
  __device__ __forceinline__ void make_uniform() {
    stage_ = __shfl_sync(0xffffffffU, stage_, 0);
    parity_ = __shfl_sync(0xffffffffU, parity_, 0);
  }
  __device__ __forceinline__ void advance() {
    if (++stage_ < kStages) return;
    stage_ = 0;
    parity_ ^= 1U;
  }

 private:
  int stage_ = 0;
  unsigned parity_ = 0;
};

/// Lets products and bulk copies of other threads, after a barrier, see what this one has stored.
__device__ __forceinline__ void publish_writes() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// The named barrier that __syncthreads() uses too.
inline constexpr int kBlockBarrier = 0;

/// Waits for all of the `threads` threads that use the named barrier. They may be in different
/// branches, and the threads of a warp may come apart.
__device__ __forceinline__ void sync_threads(int barrier, int threads) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

/// The same; whether any of them says so.
__device__ __forceinline__ bool sync_threads_or(int barrier, int threads, bool says_so) {
  unsigned any;
  asm volatile(
      "{\n"
      ".reg .pred mine, any;\n"
      "setp.ne.u32 mine, %3, 0;\n"
      "barrier.cta.red.or.pred any, %1, %2, mine;\n"
      "selp.u32 %0, 1, 0, any;\n"
      "}"
      : "=r"(any)
      : "r"(barrier), "r"(threads), "r"(says_so ? 1 : 0)
      : "memory");
  return any != 0;
}

/// Hands registers of a warpgroup to the block's other warpgroups, or takes them.
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace ladon::cuda::hopper
