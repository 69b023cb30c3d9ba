// dQ = dS K in Hopper's backward kernel: each warpgroup has dS^T of its own keys, and computes half
// of the columns of dQ over the keys of both.
//
// dS is exchanged through shared memory. A warpgroup computes dQ of a tile of rows while it works
// on the next tile, so that it need not wait for the other one: one may be in its softmax while the
// products of the other run. Half of 192 columns are one and a half boxes, in two products: an
// operand that starts inside a box must end in it.
#pragma once

#include "cuda/hopper/backward_rows.cuh"
#include "cuda/hopper/backward_tile.cuh"

namespace ladon::cuda::hopper {

/// Stores four 8 x 8 matrices transposed. Lane 8 m + r gives the address of row r of matrix m,
/// which was its column r.
__device__ __forceinline__ void store_matrices_transposed(std::uint32_t row,
                                                          const std::uint32_t (&matrices)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(matrices[0]), "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
               : "memory");
}

/// A RingPosition in one register.
template <unsigned kStages>
class CountedPosition {
 public:
  /// The position before the first: its buffer counts as filled and emptied.
  __device__ __forceinline__ static CountedPosition before_first() {
    CountedPosition position;
    position.count_ = 2 * kStages - 1;
    return position;
  }
  __device__ __forceinline__ int stage() const { return static_cast<int>(count_ % kStages); }
  __device__ __forceinline__ unsigned filled() const { return count_ / kStages % 2; }
  __device__ __forceinline__ unsigned emptied() const { return filled() ^ 1U; }
  __device__ __forceinline__ void advance() { ++count_; }

 private:
  unsigned count_ = 0;
};

template <class Half, class Shape>
class DqProducts {
 public:
  using Memory = BackwardMemory<Shape>;
  using OwnPair = typename Memory::OwnPair;
  static constexpr int kStepSteps = Shape::kStepRows / 16;  // of products over a step's rows

  // dQ comes in as many parts as a tile has steps, one with each step of the next tile.
  static constexpr int kLastPart = Shape::kSteps - 1;
  static constexpr int kRestGroups = kLastPart == 0 ? 0 : kBoxColumns / 2 / 8;
  static constexpr int kMainGroups = Memory::kDqGroups - kRestGroups;
  template <int kPart>
  using Sums = float[kPart == 0 ? kMainGroups : kRestGroups][4];

  __device__ __forceinline__ DqProducts(Memory& memory, int group)
      : memory_(memory), group_(group) {}

  /// dS^T of step `part` of a tile, as the operand of dK, to dS.
  __device__ __forceinline__ void store_dscores(const std::uint32_t (&gradients)[kStepSteps][4],
                                                int part) {
    const int thread = this->thread();
    const int row = thread / 16 % 2 * 8 + thread % 8;
    const int chunk = thread / 32 * 2 + thread / 8 % 2;
    if (part == 0) start_dscores();
    const std::uint32_t address = dscores_address() + swizzled_offset(row, chunk) +
                                  static_cast<unsigned>(part * Shape::kStepRows * kBoxRowBytes);
#pragma unroll
    for (int step = 0; step < kStepSteps; ++step) {
      store_matrices_transposed(address + static_cast<unsigned>(step * 16 * kBoxRowBytes),
                                gradients[step]);
    }
    if (part + 1 == Shape::kSteps) announce_dscores();
  }
  /// Of a tile that the own one does not meet.
  __device__ __forceinline__ void store_no_dscores() {
    start_dscores();
    const std::uint32_t address = dscores_address() + static_cast<unsigned>(thread() * 16);
#pragma unroll
    for (int i = 0; i < Memory::kDscoreBytes / 16 / kGroupThreads; ++i) {
      store_16(address + static_cast<unsigned>(i * kGroupThreads * 16), 0, 0, 0, 0);
    }
    announce_dscores();
  }

  /// Starts the products of a part of the tile before, once both warpgroups have stored its dS.
  /// Where there is none (`has_tile` is false) they have no meaning.
  template <int kPart>
  __device__ __forceinline__ void start(bool has_tile, Sums<kPart>& dq) {
    constexpr int kTileSteps = kTile / 16;
    if (kPart == 0 && has_tile) {
      memory_.dscores_barriers[read_.stage()].full.wait(read_.filled());
    }
    const TileOperand a(shared_address(memory_.dscores[read_.stage()]), Memory::kDscoreBytes);
    const TileOperand b(shared_address(memory_.own[0].first) + first_column_bytes<kPart>(),
                        OwnPair::kBoxBytes);
    hold_in_place(dq);
    begin_products();
#pragma unroll
    for (int step = 0; step < kBlockTiles * kTileSteps; ++step) {
      const int tile = step / kTileSteps;
      const int inside = step % kTileSteps;
      const std::uint64_t of_scores = a.descriptor(tile * Memory::kDscoreBytes + inside * 32);
      const std::uint64_t of_keys =
          b.descriptor(tile * static_cast<int>(sizeof(OwnPair)) + inside * 16 * kBoxRowBytes);
      step == 0 ? start_product<Half, false, false, true>(dq, of_scores, of_keys)
                : start_product<Half, true, false, true>(dq, of_scores, of_keys);
    }
    commit_products();
  }

  /// After the products: leaves dq to the thread that adds it up.
  template <int kPart>
  __device__ __forceinline__ void finish(Sums<kPart>& dq) {
    hold_in_place(dq);
    if constexpr (kPart == kLastPart) {
      arrive(memory_.dscores_barriers[read_.stage()].empty);
      read_.advance();
    }
    if constexpr (kPart == 0) {
      // The one buffer is free when the writer of the tile before has read it.
      memory_.dq_barriers[written_.stage()].empty.wait(written_.filled());
      written_.advance();
    }
    // In the order of columns: the box that is divided is the last of the first warpgroup.
    const int first = kPart == 0 ? group_ * kRestGroups : (1 - group_) * kMainGroups;
    float4* const to = &memory_.dq[group_][first][thread()];
#pragma unroll
    for (int n = 0; n < static_cast<int>(sizeof dq / sizeof dq[0]); ++n) {
      to[n * kGroupThreads] = make_float4(dq[n][0], dq[n][1], dq[n][2], dq[n][3]);
    }
    if constexpr (kPart == kLastPart) {
      publish_writes();
      arrive(memory_.dq_barriers[written_.stage()].full);
    }
  }

 private:
  /// Where the columns of a part begin in a tile of keys: those of a warpgroup are a box, half of
  /// the only one, or the first or last of three and, as the second part, half of the middle one.
  template <int kPart>
  __device__ __forceinline__ unsigned first_column_bytes() const {
    constexpr int kBox = OwnPair::kBoxBytes;
    constexpr int kHalf = kBoxRowBytes / 2;
    if constexpr (kPart > 0) return static_cast<unsigned>(kBox + group_ * kHalf);
    constexpr int kMain = kLastPart > 0                       ? 2 * kBox
                          : Shape::kHeadColumns > kBoxColumns ? kBox
                                                              : kHalf;
    return static_cast<unsigned>(group_ * kMain);
  }

  /// Within the warpgroup; what is computed from it is not kept in registers.
  __device__ __forceinline__ static int thread() {
    return static_cast<int>(fresh(threadIdx.x)) % kGroupThreads;
  }
  __device__ __forceinline__ static void arrive(Barrier& barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier.arrive();
  }

  /// Waits until dS of two tiles before has been read.
  __device__ __forceinline__ void start_dscores() {
    memory_.dscores_barriers[stored_.stage()].empty.wait(stored_.emptied());
  }
  /// Where that of this tile goes.
  __device__ __forceinline__ std::uint32_t dscores_address() {
    return shared_address(memory_.dscores[stored_.stage()][group_]);
  }
  __device__ __forceinline__ void announce_dscores() {
    publish_writes();
    arrive(memory_.dscores_barriers[stored_.stage()].full);
    stored_.advance();
  }

  Memory& memory_;
  const int group_;
  CountedPosition<2> stored_;
  CountedPosition<2> read_;
  CountedPosition<kDqWriters> written_ = CountedPosition<kDqWriters>::before_first();
};

}  // namespace ladon::cuda::hopper
