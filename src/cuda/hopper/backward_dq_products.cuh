// dQ = dS K in Hopper's backward kernel: each warpgroup has dS^T of its own keys, and computes half
// of the columns of dQ over the keys of both.
//
// dS is exchanged through shared memory. A warpgroup computes dQ of a tile of rows while it works
// on the next tile, so that it need not wait for the other one: one may be in its softmax while the
// products of the other run.
#pragma once

#include "cuda/hopper/backward_tile.cuh"

namespace ladon::cuda::hopper {

/// Lets products and bulk copies of other threads, after a barrier, see what this one has stored.
__device__ __forceinline__ void publish_writes() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// Stores four 8 x 8 matrices transposed. Lane 8 m + r gives the address of row r of matrix m,
/// which was its column r.
__device__ __forceinline__ void store_matrices_transposed(std::uint32_t row,
                                                          const std::uint32_t (&matrices)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(matrices[0]), "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
               : "memory");
}

template <class Half, int kColumns>
class DqProducts {
 public:
  using Memory = BackwardMemory<kColumns>;
  using Pair = typename Memory::Pair;
  using Sums = float[Memory::kDqGroups][4];
  static constexpr int kTileSteps = kTile / 16;

  __device__ __forceinline__ DqProducts(Memory& memory, int group)
      : memory_(memory), group_(group) {}

  /// dS^T of a tile, as the operand of dK, to dS.
  __device__ __forceinline__ void store_dscores(const std::uint32_t (&gradients)[kTileSteps][4]) {
    const int thread = this->thread();
    const int row = thread / 16 % 2 * 8 + thread % 8;
    const int chunk = thread / 32 * 2 + thread / 8 % 2;
    const std::uint32_t address = start_dscores() + swizzled_offset(row, chunk);
#pragma unroll
    for (int step = 0; step < kTileSteps; ++step) {
      store_matrices_transposed(address + static_cast<unsigned>(step * 16 * kBoxRowBytes),
                                gradients[step]);
    }
    announce_dscores();
  }
  /// Of a tile that the own one does not meet.
  __device__ __forceinline__ void store_no_dscores() {
    const std::uint32_t address = start_dscores() + static_cast<unsigned>(thread() * 16);
#pragma unroll
    for (int i = 0; i < Memory::kDscoreBytes / 16 / kGroupThreads; ++i) {
      store_16(address + static_cast<unsigned>(i * kGroupThreads * 16), 0, 0, 0, 0);
    }
    announce_dscores();
  }

  /// Starts the products of the tile before, once both warpgroups have stored its dS. Where there
  /// is none (`has_tile` is false) they have no meaning.
  __device__ __forceinline__ void start(bool has_tile, Sums& dq) {
    constexpr int kColumnBytes = kColumns > kBoxColumns ? Pair::kBoxBytes : kBoxRowBytes / 2;
    if (has_tile) memory_.dscores_barriers[read_.stage()].full.wait(read_.filled());
    const TileOperand a(shared_address(memory_.dscores[read_.stage()]), Memory::kDscoreBytes);
    const TileOperand b(
        shared_address(memory_.own[0].first) + static_cast<unsigned>(group_ * kColumnBytes),
        Pair::kBoxBytes);
    hold_in_place(dq);
    begin_products();
#pragma unroll
    for (int step = 0; step < kBlockTiles * kTileSteps; ++step) {
      const int tile = step / kTileSteps;
      const int inside = step % kTileSteps;
      const std::uint64_t of_scores = a.descriptor(tile * Memory::kDscoreBytes + inside * 32);
      const std::uint64_t of_keys =
          b.descriptor(tile * static_cast<int>(sizeof(Pair)) + inside * 16 * kBoxRowBytes);
      step == 0 ? start_product<Half, false, false, true>(dq, of_scores, of_keys)
                : start_product<Half, true, false, true>(dq, of_scores, of_keys);
    }
    commit_products();
  }

  /// After the products: leaves dq to the thread that adds it up.
  __device__ __forceinline__ void finish(Sums& dq) {
    hold_in_place(dq);
    arrive(memory_.dscores_barriers[read_.stage()].empty);
    read_.advance();
    // The one buffer is free when the writer of the tile before has read it.
    memory_.dq_barriers[written_.stage()].empty.wait(written_.filled());
    written_.advance();
    const int thread = this->thread();
#pragma unroll
    for (int n = 0; n < Memory::kDqGroups; ++n) {
      memory_.dq[group_][n][thread] = make_float4(dq[n][0], dq[n][1], dq[n][2], dq[n][3]);
    }
    publish_writes();
    arrive(memory_.dq_barriers[written_.stage()].full);
  }

 private:
  /// Within the warpgroup; what is computed from it is not kept in registers.
  __device__ __forceinline__ static int thread() {
    return static_cast<int>(fresh(threadIdx.x)) % kGroupThreads;
  }
  __device__ __forceinline__ static void arrive(Barrier& barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier.arrive();
  }

  /// Waits until dS of two tiles before has been read; the address for this one.
  __device__ __forceinline__ std::uint32_t start_dscores() {
    memory_.dscores_barriers[stored_.stage()].empty.wait(stored_.emptied());
    return shared_address(memory_.dscores[stored_.stage()][group_]);
  }
  __device__ __forceinline__ void announce_dscores() {
    publish_writes();
    arrive(memory_.dscores_barriers[stored_.stage()].full);
    stored_.advance();
  }

  Memory& memory_;
  const int group_;
  RingPosition<2> stored_;
  RingPosition<2> read_;
  RingPosition<kDqWriters> written_ = RingPosition<kDqWriters>::before_first();
};

}  // namespace ladon::cuda::hopper
