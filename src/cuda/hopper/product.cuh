// Products of 16-bit matrices on Hopper: projections and their gradients (projection_product.cuh).
//
// A block takes tile after tile of 128 x 192, or 128 x 176, 128, 96 or 64 where those keep more
// multiprocessors busy. A thread copies a and b through a ring of stages, 64 values of k each; two
// warpgroups of 64 rows multiply. Chunks of 256 are summed by wgmma in steps of 16 and added to the
// totals in registers, as projection_mma.cuh does, so the bits are the same: 96 sums and 96 totals
// a thread. While a tile is stored, the next one is copied. Several products of one k share a
// launch: q, k and v of a layer, which alone would not fill a GPU.
//
// A step of 16 takes 192 cycles of tensor cores, and 208 of the shared memory's port: 16 KiB read,
// 10 KiB written by the copies. A tile of 128 x N takes N and 64 + 3/4 N. Blocks one by one would
// read 50 bytes a cycle from L2, which is more than it gives to all: two blocks of a cluster, one
// above the other, each copy half of b to both.
//
// H200, bf16, two runs, TFLOP/s of blocks one by one, of clusters and of cuBLAS: 8192 rows of 8192
// x 8192 607 and 612, 686 and 687, 695; 16384 rows of 4096 x 4096 642 and 579, 675 and 716, 735;
// of 6144 x 4096 573 and 574, 650 and 644, 694; 4096 rows of 4096 x 4096 515 and 511, 589 (in tiles
// of 176 columns, 557 of 192), 674; a weight gradient of 16384 rows 540 and 546, 571, 714.
// projection_mma.cuh has 312 in the first. Stores of whole chunks instead of pairs are 3 % of those
// gains. Neither the stores nor the chunks' additions are the limit: without either the same,
// within noise.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/hopper/barrier.cuh"
#include "cuda/hopper/bulk_copy.cuh"
#include "cuda/hopper/cluster.cuh"
#include "cuda/hopper/wgmma_narrow.cuh"
#include "cuda/kernels/projection_mma.cuh"

namespace ladon::cuda::hopper {

using projection::BlockTile;
using projection::Product;

inline constexpr int kProductRows = 128;  // of a tile
/// A tile of c; each of 8 warps has 16 rows.
template <int kColumns>
using ProductTile = projection::TileShape<kProductRows, kColumns, 8, 1, 1>;
inline constexpr int kProductGroups = kProductRows / kGroupRows;
inline constexpr int kProductThreads = (kProductGroups + 1) * kGroupThreads;
inline constexpr int kProductDepth = 64;  // of a stage

/// One or several products of one k and dtype.
struct HopperProductParams {
  struct Operands {
    CUtensorMap a;  // {k, m, heads}, or {m, k, heads} where a is not along k
    CUtensorMap b;  // in boxes that one block of a cluster copies
  } operands[projection::kMostProducts];
  Product products[projection::kMostProducts];
  unsigned tiles[projection::kMostProducts] = {};  // of clusters; 0 where there is no product
};

/// Rows of b that a tile's copies bring: whole boxes, which are of 64 rows across k.
template <int kColumns>
inline constexpr int kCopiedColumns = (kColumns + kBoxColumns - 1) / kBoxColumns* kBoxColumns;

template <int kColumns>
struct ProductMemory {
  struct Stage {
    alignas(1024) unsigned char a[kProductRows * kBoxRowBytes];
    alignas(1024) unsigned char b[kCopiedColumns<kColumns> * kBoxRowBytes];
  };
  // As many as fit: 5 for 192 columns, 9 for 64. Narrow tiles are for few rows, where most of b
  // comes from memory and little else hides its latency.
  static constexpr int kStages = (227 * 1024 - 2 * 1024) / sizeof(Stage);
  Stage stages[kStages];
  BufferBarriers barriers[kStages];
};

/// Calls run(i, tile) for the tiles of a block, of product i. Each cluster of kTiles blocks takes
/// every so many-th of kTiles tiles above each other, its blocks one of them each.
template <int kColumns, int kTiles, class Run>
__device__ __forceinline__ void for_each_tile(const HopperProductParams& params, const Run& run) {
  unsigned first = 0;  // tile of the product
  unsigned next = blockIdx.x / kTiles;
#pragma unroll 1
  for (int i = 0; i < static_cast<int>(projection::kMostProducts); ++i) {
    for (; next < first + params.tiles[i]; next += gridDim.x / kTiles) {
      BlockTile tile =
          projection::tile_at(params.products[i], next - first, kTiles * kProductRows, kColumns);
      tile.m = kTiles * tile.m + blockIdx.x % kTiles;
      tile.split = 0;  // products with splits do not come here
      run(i, tile);
    }
    first += params.tiles[i];
  }
}

/// The thread that copies: a for its own block, and its part of b for all blocks of the cluster.
template <int kColumns, int kTiles, class Layout>
class ProductProducer {
 public:
  using Memory = ProductMemory<kColumns>;
  static constexpr int kBytesOfB =
      (Layout::kOfB ? kColumns : kCopiedColumns<kColumns>)*kBoxRowBytes;

  __device__ __forceinline__ ProductProducer(const HopperProductParams& params, Memory& memory)
      : params_(params), memory_(memory) {}

  __device__ __forceinline__ void run() {
    prefetch_map(params_.operands[0].a);
    prefetch_map(params_.operands[0].b);
    const auto depth = static_cast<int>(params_.products[0].k);
    for_each_tile<kColumns, kTiles>(params_, [&](int i, const BlockTile& tile) {
      const HopperProductParams::Operands& operands = params_.operands[i];
      for (int k = 0; k < depth; k += kProductDepth) {
        BufferBarriers& barriers = memory_.barriers[ring_.stage()];
        typename Memory::Stage& stage = memory_.stages[ring_.stage()];
        barriers.empty.wait(ring_.emptied());
        barriers.full.arrive_expecting(sizeof stage.a + kBytesOfB);
        copy<Layout::kOfA, kProductRows, 1>(stage.a, operands.a, tile.m, k, tile.head,
                                            barriers.full);
        copy<Layout::kOfB, kColumns, kTiles>(stage.b, operands.b, tile.n, k, tile.head,
                                             barriers.full);
        ring_.advance();
      }
    });
  }

 private:
  /// One box of rows where k is contiguous; else boxes of 64 rows, each of 64 values of k. Of
  /// kParts blocks that need them, this one copies a part of the rows, or of the values of k.
  template <bool kAlongK, int kRows, int kParts>
  __device__ __forceinline__ void copy(unsigned char* to, const CUtensorMap& map, unsigned tile,
                                       int k, unsigned head, const Barrier& barrier) {
    const auto row = static_cast<int>(tile) * kRows;
    const int part = kParts == 1 ? 0 : static_cast<int>(blockIdx.x % kParts);
    constexpr int kLines = (kAlongK ? kRows : kProductDepth) / kParts;  // of a part
    to += part * kLines * kBoxRowBytes;
    if constexpr (kAlongK) {
      copy_to_all<kParts>(to, map, k, row + part * kLines, head, barrier);
    } else {
#pragma unroll
      for (int first = 0; first < kRows; first += kBoxColumns) {
        copy_to_all<kParts>(to + first * kBoxRowBytes, map, row + first, k + part * kLines, head,
                            barrier);
      }
    }
  }
  template <int kBlocks>
  __device__ __forceinline__ void copy_to_all(unsigned char* to, const CUtensorMap& map, int x,
                                              int y, unsigned head, const Barrier& barrier) {
    const auto z = static_cast<int>(head);
    if constexpr (kBlocks == 1) {
      copy_box(shared_address(to), map, x, y, z, barrier);
    } else {
      constexpr std::uint16_t kAll = (1U << kBlocks) - 1;
      copy_box(shared_address(to), map, x, y, z, barrier, Multicast{kAll, L2Policy::kNormal});
    }
  }

  const HopperProductParams& params_;
  Memory& memory_;
  RingPosition<Memory::kStages> ring_;
};

/// A warpgroup that computes 64 rows of each tile.
template <class Half, int kColumns, int kTiles, class Layout, class Epilogue>
class ProductConsumer {
 public:
  using Memory = ProductMemory<kColumns>;
  using Tile = ProductTile<kColumns>;
  using Sums = projection::Sums<Tile>;

  __device__ __forceinline__ ProductConsumer(const HopperProductParams& params, Memory& memory)
      : params_(params),
        memory_(memory),
        group_(uniform(static_cast<int>(threadIdx.x) / kGroupThreads)) {}

  __device__ __forceinline__ void run() {
    for_each_tile<kColumns, kTiles>(params_, [&](int i, const BlockTile& tile) {
      const Product& product = params_.products[i];
      // Not kept in registers, which the sums need.
      const auto stages_of = [](std::int64_t depth) {
        return uniform(static_cast<int>(ceil_div(depth, kProductDepth)));
      };
      int left = stages_of(product.k);
      do {
        const int stages = min(left, stages_of(product.longest_sum));
        Sums totals;
        add_chunks(totals, stages);
        Epilogue::write(product, tile, totals, product.c.adds || left != stages_of(product.k));
        left -= stages;
      } while (left > 0);
    });
  }

 private:
  static constexpr int kChunkStages = projection::kTensorCoreChunk / kProductDepth;

  __device__ __forceinline__ void add_chunks(Sums& totals, int stages) {
    Sums chunk;
    totals.clear();
    for (; stages > 0; stages -= kChunkStages) {
      ring_.make_uniform();
      auto& sums = chunk.of[0];
      int read = ring_.stage();
      hold_in_place(sums);
      start_stage<false>(sums);
      for (int stage = 1; stage < min(stages, kChunkStages); ++stage) {
        const int next = ring_.stage();
        start_stage<true>(sums);
        finish_products<1>();
        release(read);
        read = next;
      }
      finish_products<0>();
      hold_in_place(sums);
      release(read);
      totals.add(chunk);
    }
  }

  template <bool kAdds>
  __device__ __forceinline__ void start_stage(float (&sums)[Tile::kTilesN][4]) {
    const typename Memory::Stage& stage = memory_.stages[ring_.stage()];
    memory_.barriers[ring_.stage()].full.wait(ring_.filled());
    // Boxes of 64 rows are 64 values of k long where k is not contiguous.
    const TileOperand a(
        shared_address(stage.a) + static_cast<unsigned>(group_ * kGroupRows * kBoxRowBytes),
        kProductDepth * kBoxRowBytes);
    const TileOperand b(shared_address(stage.b), kProductDepth * kBoxRowBytes);
    begin_products();
#pragma unroll
    for (int step = 0; step < kProductDepth / 16; ++step) {
      const std::uint64_t a_step = a.descriptor(offset<Layout::kOfA>(step));
      const std::uint64_t b_step = b.descriptor(offset<Layout::kOfB>(step));
      if (step == 0) {
        start_step<kAdds>(sums, a_step, b_step);
      } else {
        start_step<true>(sums, a_step, b_step);
      }
    }
    commit_products();
    ring_.advance();
  }
  template <bool kAdds>
  __device__ __forceinline__ static void start_step(float (&sums)[Tile::kTilesN][4],
                                                    std::uint64_t a, std::uint64_t b) {
    if constexpr (kColumns == 96) {
      static_assert(Layout::kOfA && Layout::kOfB, "boxes across k have 64 columns");
      start_narrow_product<Half, kAdds>(sums, a, b);
    } else {
      start_product<Half, kAdds, !Layout::kOfA, !Layout::kOfB>(sums, a, b);
    }
  }
  template <bool kAlongK>
  __device__ __forceinline__ static constexpr int offset(int step) {
    return kAlongK ? step * 32 : step * 16 * kBoxRowBytes;
  }

  /// To all blocks that copy to it.
  __device__ __forceinline__ void release(int stage) {
    __syncwarp();
    const unsigned lane = threadIdx.x % 32;
    if (lane >= kTiles) return;
    Barrier& empty = memory_.barriers[stage].empty;
    if constexpr (kTiles == 1) {
      empty.arrive();
    } else {
      arrive_at(empty, lane);
    }
  }

  const HopperProductParams& params_;
  Memory& memory_;
  const int group_;
  RingPosition<Memory::kStages> ring_;
};

/// kTiles: blocks of a cluster, which share b.
template <class Half, int kColumns, int kTiles, class Layout, class Epilogue>
__global__ void __cluster_dims__(kTiles, 1, 1) __launch_bounds__(kProductThreads, 1)
    multiply_wgmma(const __grid_constant__ HopperProductParams params) {
  extern __shared__ unsigned char shared[];
  auto& memory = *reinterpret_cast<ProductMemory<kColumns>*>(aligned_memory(shared));
  if (threadIdx.x == 0) {
    for (BufferBarriers& barriers : memory.barriers) {
      barriers.full.init(1);
      barriers.empty.init(kTiles * kProductGroups * kGroupThreads / 32);
    }
    publish_barriers();
  }
  kTiles > 1 ? sync_cluster() : __syncthreads();
  // Those that compute come first, as the epilogues count rows from them.
  if (threadIdx.x >= kProductGroups * kGroupThreads) {
    give_registers<40>();
    if (threadIdx.x == kProductGroups * kGroupThreads) {
      ProductProducer<kColumns, kTiles, Layout>(params, memory).run();
    }
  } else {
    take_registers<232>();
    ProductConsumer<Half, kColumns, kTiles, Layout, Epilogue>(params, memory).run();
  }
  if constexpr (kTiles > 1) sync_cluster();
}

}  // namespace ladon::cuda::hopper
