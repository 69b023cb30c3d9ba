// y = x W^T + b of 16-bit operands for up to 64 rows on Hopper, where reading W is the work:
// decoding.
//
// Features are cut into boxes of 16, those of several products one after the other, and each block
// of threads has as many boxes as give every multiprocessor its share: 3 for q, k and v of a
// Llama-3-8B layer (384 boxes, 128 blocks), 2 for its output (256 boxes). A block computes up to 64
// rows of up to 64 features over all of k. One thread copies x and W through a ring of stages, a
// chunk of 256 values of k each, which takes all of shared memory; a warpgroup multiplies. It sums
// a chunk by wgmma in steps of 16 while it adds the one before to the totals in registers, so the
// bits are those of product.cuh and projection_decode.cu.
//
// x is copied as it is: the rows of a tile that do not exist are whatever follows in shared memory,
// and their sums are not stored.
//
// Shared memory: up to 226 KiB, of which 96 KiB and more are W on its way. Registers: 8 sums and 4
// totals for each 8 features.
//
// H200, bf16, q, k and v (50 MB) and the output (34 MB) of a Llama-3-8B layer, in turns with other
// weights; expected are 11 and 7.3 us, W at the 4.6 TB/s that memory can be read at:
//   rows   this kernel        projection_decode.cu   product.cuh
//   8      16.4 and 11.9 us   15.3 and 11.1 us
//   16     16.4 and 11.8      21.5 and 12.0
//   33     16.5 and 11.9                             31.5 and 26.7 us
//   64     17.5 and 12.2                             28.2 and 26.8
//
// Tried and lost: stages of 64 values of k (20 and 17 us: the warpgroup waited for barriers more
// than it multiplied); clusters of 2 or 4 blocks that copy x for each other (49 and 96 us, with
// stages of 64).
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/hopper/barrier.cuh"
#include "cuda/hopper/bulk_copy.cuh"
#include "cuda/hopper/wgmma_narrow.cuh"
#include "cuda/kernels/dependent_launch.cuh"
#include "cuda/kernels/projection_mma.cuh"

namespace ladon::cuda::hopper {

using projection::BlockTile;
using projection::Product;

inline constexpr int kRowsDepth = projection::kTensorCoreChunk;  // of a stage
inline constexpr int kDepthBoxes = kRowsDepth / kBoxColumns;     // side by side, along k
inline constexpr int kBoxFeatures = 16;
inline constexpr int kBoxBytes = kBoxFeatures * kBoxRowBytes;
inline constexpr int kMostRowsStages = 24;
inline constexpr int kRowsThreads = kGroupThreads + 32;  // those that multiply, and one that copies

/// Products of one x.
struct RowsProductParams {
  CUtensorMap x;  // {k, m, 1}
  CUtensorMap w[projection::kMostProducts];
  Product products[projection::kMostProducts];
  int boxes[projection::kMostProducts] = {};  // of features; 0 where there is no product
  int tiles = 0;
  int x_rows = 0;  // of a stage
  int stages = 0;
};

/// One of a tile's boxes of features.
struct FeatureBox {
  int product = -1;  // none
  int index = 0;     // in the product
};
__device__ __forceinline__ FeatureBox feature_box(const RowsProductParams& params, int number) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(projection::kMostProducts); ++i) {
    if (number < params.boxes[i]) return {i, number};
    number -= params.boxes[i];
  }
  return {};
}

/// What the threads of a block share: the stages' parts of x, then those of W.
template <int kBoxes>
struct RowsMemory {
  static constexpr int kWBytes = kBoxes * kBoxBytes;  // of one box along k

  BufferBarriers* barriers;
  std::uint32_t x;
  std::uint32_t w;
  int x_bytes;  // of one box along k

  __device__ __forceinline__ std::uint32_t x_of(int stage, int box) const {
    return x + static_cast<std::uint32_t>((stage * kDepthBoxes + box) * x_bytes);
  }
  __device__ __forceinline__ std::uint32_t w_of(int stage, int box) const {
    return w + static_cast<std::uint32_t>((stage * kDepthBoxes + box) * kWBytes);
  }
};

/// Which stage comes next in a ring of any number of them.
class StagePosition {
 public:
  __device__ __forceinline__ explicit StagePosition(int stages) : stages_(stages) {}
  __device__ __forceinline__ int stage() const { return stage_; }
  __device__ __forceinline__ unsigned filled() const { return parity_; }
  __device__ __forceinline__ unsigned emptied() const { return parity_ ^ 1U; }
  __device__ __forceinline__ void make_uniform() {
    stage_ = uniform(stage_);
    parity_ = static_cast<unsigned>(uniform(static_cast<int>(parity_)));
  }
  __device__ __forceinline__ void advance() {
    if (++stage_ < stages_) return;
    stage_ = 0;
    parity_ ^= 1U;
  }

 private:
  int stages_;
  int stage_ = 0;
  unsigned parity_ = 0;
};

/// The thread that copies. What a tile's copies have in common is worked out once: with a search
/// for the product of each copy, this thread was slower than memory (q, k and v: 52 us instead of
/// 20).
template <int kBoxes>
class RowsProducer {
 public:
  __device__ __forceinline__ RowsProducer(const RowsProductParams& params,
                                          const RowsMemory<kBoxes>& memory)
      : params_(params), memory_(memory), ring_(params.stages) {}

  __device__ __forceinline__ void run() {
    const auto depth = static_cast<int>(params_.products[0].k);
    for (int tile = static_cast<int>(blockIdx.x); tile < params_.tiles;
         tile += static_cast<int>(gridDim.x)) {
      set_tile(tile);
      for (int k = 0; k < depth; k += kRowsDepth) copy_stage(k);
    }
    start_kernel_after();
  }

 private:
  __device__ __forceinline__ void set_tile(int tile) {
    bytes_ = kDepthBoxes * memory_.x_bytes;
#pragma unroll
    for (int j = 0; j < kBoxes; ++j) {
      const FeatureBox box = feature_box(params_, tile * kBoxes + j);
      maps_[j] = box.product < 0 ? nullptr : &params_.w[box.product];
      features_[j] = box.index * kBoxFeatures;
      if (box.product >= 0) bytes_ += kDepthBoxes * kBoxBytes;
    }
  }

  __device__ __forceinline__ void copy_stage(int k) {
    const int stage = ring_.stage();
    Barrier& full = memory_.barriers[stage].full;
    memory_.barriers[stage].empty.wait(ring_.emptied());
    full.arrive_expecting(bytes_);
#pragma unroll
    for (int box = 0; box < kDepthBoxes; ++box) {
#pragma unroll
      for (int j = 0; j < kBoxes; ++j) {
        if (maps_[j] == nullptr) continue;
        copy_box(memory_.w_of(stage, box) + j * kBoxBytes, *maps_[j],
                 {.x = k + box * kBoxColumns, .y = features_[j], .z = 0}, full);
      }
      copy_box(memory_.x_of(stage, box), params_.x, {.x = k + box * kBoxColumns, .y = 0, .z = 0},
               full);
    }
    ring_.advance();
  }

  const RowsProductParams& params_;
  const RowsMemory<kBoxes>& memory_;
  StagePosition ring_;
  // Of a tile.
  const CUtensorMap* maps_[kBoxes];
  int features_[kBoxes];
  int bytes_ = 0;  // of a stage
};

/// The warpgroup that multiplies.
template <class Half, int kBoxes>
class RowsConsumer {
  /// Of a box; each of the four warps has 16 rows.
  using Tile = projection::TileShape<kGroupRows, kBoxFeatures, 4, 1, 1>;
  static constexpr int kColumnGroups = kBoxes * kBoxFeatures / 8;
  using Sums = float[kColumnGroups][4];

 public:
  __device__ __forceinline__ RowsConsumer(const RowsProductParams& params,
                                          const RowsMemory<kBoxes>& memory)
      : params_(params), memory_(memory), ring_(params.stages) {}

  __device__ __forceinline__ void run() {
    const int chunks = uniform(static_cast<int>(ceil_div(params_.products[0].k, kRowsDepth)));
    for (int tile = static_cast<int>(blockIdx.x); tile < params_.tiles;
         tile += static_cast<int>(gridDim.x)) {
      Sums totals = {};
      add_chunks(totals, chunks);
      store(totals, tile);
    }
  }

 private:
  /// Two chunks at a time are under way.
  __device__ __forceinline__ void add_chunks(Sums& totals, int chunks) {
    Sums even;
    Sums odd;
    start_chunk(even);
    for (; chunks > 2; chunks -= 2) {
      start_chunk(odd);
      finish_chunk<1>(totals, even);
      start_chunk(even);
      finish_chunk<1>(totals, odd);
    }
    if (chunks == 2) {
      start_chunk(odd);
      finish_chunk<1>(totals, even);
      finish_chunk<0>(totals, odd);
    } else {
      finish_chunk<0>(totals, even);
    }
  }

  __device__ __forceinline__ void start_chunk(Sums& sums) {
    ring_.make_uniform();
    const int stage = ring_.stage();
    memory_.barriers[stage].full.wait(ring_.filled());
    const TileOperand x(memory_.x_of(stage, 0), kBoxRowBytes);
    const TileOperand w(memory_.w_of(stage, 0), kBoxRowBytes);
    hold_in_place(sums);
    begin_products();
#pragma unroll
    for (int box = 0; box < kDepthBoxes; ++box) {
#pragma unroll
      for (int step = 0; step < kBoxColumns / 16; ++step) {
        const std::uint64_t x_step = x.descriptor(box * memory_.x_bytes + step * 32);
        const std::uint64_t w_step = w.descriptor(box * RowsMemory<kBoxes>::kWBytes + step * 32);
        if (box == 0 && step == 0) {
          start_narrow_product<Half, false>(sums, x_step, w_step);
        } else {
          start_narrow_product<Half, true>(sums, x_step, w_step);
        }
      }
    }
    commit_products();
    ring_.advance();
  }

  /// Adds a chunk when at most kPending later ones are under way, and gives its stage back.
  template <int kPending>
  __device__ __forceinline__ void finish_chunk(Sums& totals, Sums& sums) {
    finish_products<kPending>();
    hold_in_place(sums);
    __syncwarp();
    if (threadIdx.x % 32 == 0) memory_.barriers[used_].empty.arrive();
    if (++used_ == params_.stages) used_ = 0;
#pragma unroll
    for (int n = 0; n < kColumnGroups; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) totals[n][e] += sums[n][e];
    }
  }

  __device__ __forceinline__ void store(const Sums& totals, int tile) const {
#pragma unroll
    for (int j = 0; j < kBoxes; ++j) {
      const FeatureBox box = feature_box(params_, tile * kBoxes + j);
      if (box.product < 0) break;
      projection::Sums<Tile> sums;
#pragma unroll
      for (int n = 0; n < Tile::kTilesN; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums.of[0][n][e] = totals[j * Tile::kTilesN + n][e];
      }
      const BlockTile place{.head = 0, .split = 0, .m = 0, .n = static_cast<unsigned>(box.index)};
      projection::StoreSums::write(params_.products[box.product], place, sums, false);
    }
  }

  const RowsProductParams& params_;
  const RowsMemory<kBoxes>& memory_;
  StagePosition ring_;
  int used_ = 0;  // the stage that is given back next
};

template <class Half, int kBoxes>
__global__ void __launch_bounds__(kRowsThreads, 1)
    multiply_rows(const __grid_constant__ RowsProductParams params) {
  extern __shared__ unsigned char shared[];
  __shared__ BufferBarriers barriers[kMostRowsStages];
  RowsMemory<kBoxes> memory{.barriers = barriers,
                            .x = shared_address(aligned_memory(shared)),
                            .w = 0,
                            .x_bytes = params.x_rows * kBoxRowBytes};
  memory.w = memory.x_of(params.stages, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < params.stages; ++i) {
      barriers[i].full.init(1);
      barriers[i].empty.init(kGroupThreads / 32);
    }
    publish_barriers();
  }
  __syncthreads();
  wait_for_kernel_before();
  if (threadIdx.x >= kGroupThreads) {
    if (threadIdx.x == kGroupThreads) RowsProducer<kBoxes>(params, memory).run();
  } else {
    RowsConsumer<Half, kBoxes>(params, memory).run();
  }
}

}  // namespace ladon::cuda::hopper
