// Products of 16-bit matrices by tensor cores: the kernel of projections and of their gradients.
//
// A block computes one tile of c, its warps disjoint parts of it. Tiles of a and b go through three
// stages of shared memory by asynchronous copies: two are on their way while one is multiplied.
// Each thread holds the running chunk of its sums and their totals, which is what limits the large
// tile to 128x128: 64 + 64 accumulators and two sets of fragments, 24 registers each.
//
// 2 m n k flops; a is read n / 128 times and b m / 128 times, mostly from L2. Per k step of 16 a
// large block reads 24 KiB of fragments from shared memory, 192 cycles at 128 bytes a cycle, and
// multiplies for about as long (mma.sync has two thirds of Hopper's peak): the expected limit is
// both together, 400 TFLOP/s and more on an H200.
#pragma once

#include <cstdint>

#include "cuda/kernels/projection_results.cuh"
#include "cuda/kernels/projection_tiles.cuh"

namespace ladon::cuda::projection {

inline constexpr int kStages = 3;

/// A block's tile of c, and how its warps share it.
template <int kRowsOfA, int kRowsOfB, int kWarpsAlongM, int kWarpsAlongN, int kBlocksPerSm>
struct TileShape {
  static constexpr int kM = kRowsOfA;
  static constexpr int kN = kRowsOfB;
  static constexpr int kWarpsM = kWarpsAlongM;
  static constexpr int kWarpsN = kWarpsAlongN;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kBlocks = kBlocksPerSm;
  static constexpr int kWarpM = kM / kWarpsM;
  static constexpr int kWarpN = kN / kWarpsN;
  static constexpr int kTilesM = kWarpM / 16;  // instructions
  static constexpr int kTilesN = kWarpN / 8;
  static constexpr int kStageBytes = kTileBytes<kM> + kTileBytes<kN>;
  static_assert(kTilesN % 2 == 0, "B operands are loaded in pairs");
};
using LargeTile = TileShape<128, 128, 2, 4, 1>;
using SmallTile = TileShape<64, 64, 2, 2, 3>;

/// Which operands are contiguous along k.
template <bool kA, bool kB>
struct AlongK {
  static constexpr bool kOfA = kA;
  static constexpr bool kOfB = kB;
};

/// A warp's operands of one k step.
template <class Shape, class Layout>
struct Fragments {
  std::uint32_t a[Shape::kTilesM][4];
  std::uint32_t b[Shape::kTilesN / 2][4];

  __device__ void load(std::uint32_t stage, int step) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int row_a = warp / Shape::kWarpsN * Shape::kWarpM;
    const int row_b = warp % Shape::kWarpsN * Shape::kWarpN;
#pragma unroll
    for (int i = 0; i < Shape::kTilesM; ++i) {
      load_a<Shape::kM, Layout::kOfA>(a[i], stage, row_a + 16 * i, step, lane);
    }
#pragma unroll
    for (int j = 0; j < Shape::kTilesN / 2; ++j) {
      load_b<Shape::kN, Layout::kOfB>(b[j], stage + kTileBytes<Shape::kM>, row_b + 16 * j, step,
                                      lane);
    }
  }
};

/// sums += the product of one stage's tiles. Fragments of the next step are loaded while those of
/// this one are multiplied. Calls after_first_step() when the tensor cores have work.
template <class Element, class Shape, class Layout, class AfterFirstStep>
__device__ inline void multiply_stage(Sums<Shape>& sums, std::uint32_t stage,
                                      const AfterFirstStep& after_first_step) {
  constexpr int kSteps = kTileK / kStepK;
  Fragments<Shape, Layout> fragments[2];
  fragments[0].load(stage, 0);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if (step + 1 < kSteps) fragments[(step + 1) % 2].load(stage, step + 1);
    const auto& now = fragments[step % 2];
#pragma unroll
    for (int i = 0; i < Shape::kTilesM; ++i) {
#pragma unroll
      for (int j = 0; j < Shape::kTilesN; ++j) {
        multiply_add<Element>(sums.of[i][j], now.a[i], now.b[j / 2][j % 2 * 2],
                              now.b[j / 2][j % 2 * 2 + 1]);
      }
    }
    if (step == 0) after_first_step();
  }
}

/// totals = the product of rows of a and of b, chunk by chunk. Called by all threads of a block.
template <class Element, class Shape, class Layout>
__device__ inline void multiply_tiles(Sums<Shape>& totals, const OperandRows& a,
                                      const OperandRows& b, std::uint32_t shared) {
  constexpr int kTilesPerChunk = kTensorCoreChunk / kTileK;
  const int thread = static_cast<int>(threadIdx.x);
  const int tiles = static_cast<int>(ceil_div(a.depth, kTileK));
  TileCopy<Shape::kM, Layout::kOfA, Shape::kThreads> copy_a(a, thread);
  TileCopy<Shape::kN, Layout::kOfB, Shape::kThreads> copy_b(b, thread);
  // Always commits, so that the number of groups tells which tiles have arrived.
  const auto start_copies = [&](int tile) {
    if (tile < tiles) {
      const std::uint32_t stage = shared + tile % kStages * Shape::kStageBytes;
      copy_a.start(stage);
      copy_a.advance(1);
      copy_b.start(stage + kTileBytes<Shape::kM>);
      copy_b.advance(1);
    }
    commit_copies();
  };
#pragma unroll 1
  for (int tile = 0; tile < kStages - 1; ++tile) start_copies(tile);

  Sums<Shape> chunk;
  chunk.clear();
  totals.clear();
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    wait_for_copies<kStages - 2>();
    __syncthreads();  // everyone's copies of this tile are there, and the last tile is used up
    multiply_stage<Element, Shape, Layout>(chunk, shared + tile % kStages * Shape::kStageBytes,
                                           [&] { start_copies(tile + kStages - 1); });
    if (tile % kTilesPerChunk == kTilesPerChunk - 1 || tile + 1 == tiles) {
      totals.add(chunk);
      chunk.clear();
    }
  }
}

template <class Element, class Shape, class Layout, class Epilogue>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    multiply_tensor_core(const __grid_constant__ Product product) {
  extern __shared__ __align__(128) unsigned char stages[];
  const BlockTile tile = tile_at(product, blockIdx.x, Shape::kM, Shape::kN);
  const auto rows_of = [&](const ProductOperand& operand, std::int64_t row, std::int64_t rows,
                           std::int64_t k) -> OperandRows {
    return {.data = static_cast<const std::uint16_t*>(operand.data) +
                    first_element(operand, tile.head, row, k),
            .stride = operand.stride,
            .rows = rows - row,
            .depth = min(tile.k_end(product) - k, product.longest_sum),
            .vectors = operand.vectors};
  };
  bool adds = product.c.adds;
  std::int64_t k = tile.k_begin(product);
  do {
    Sums<Shape> totals;
    multiply_tiles<Element, Shape, Layout>(
        totals, rows_of(product.a, std::int64_t{tile.m} * Shape::kM, product.m, k),
        rows_of(product.b, std::int64_t{tile.n} * Shape::kN, product.n, k), shared_address(stages));
    Epilogue::write(product, tile, totals, adds);
    adds = true;
    k += product.longest_sum;
    __syncthreads();  // the next sum's copies overwrite the stages
  } while (k < tile.k_end(product));
}

template <class Element, class Shape, class Layout, class Epilogue>
void launch_shape(Queue& queue, const Product& product) {
  const std::int64_t blocks =
      num_tiles(product, Shape::kM, Shape::kN) * product.heads * product.splits;
  queue.launch(multiply_tensor_core<Element, Shape, Layout, Epilogue>,
               {.blocks = dim3(static_cast<unsigned>(blocks)),
                .threads = dim3(Shape::kThreads),
                .shared_bytes = std::size_t{kStages} * Shape::kStageBytes},
               product);
}

/// Launches the kernel of the operands' dtype with the large or the small tile.
template <class Layout, class Epilogue>
void launch_tensor_core(Queue& queue, const Product& product, bool large) {
  const bool f16 = product.a.dtype == DType::kF16;
  if (f16 && large) return launch_shape<__half, LargeTile, Layout, Epilogue>(queue, product);
  if (f16) return launch_shape<__half, SmallTile, Layout, Epilogue>(queue, product);
  if (large) return launch_shape<__nv_bfloat16, LargeTile, Layout, Epilogue>(queue, product);
  return launch_shape<__nv_bfloat16, SmallTile, Layout, Epilogue>(queue, product);
}

}  // namespace ladon::cuda::projection
