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

#include "cuda/kernels/projection_product.cuh"
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

/// A thread's part of a tile.
template <class Shape>
struct Sums {
  float of[Shape::kTilesM][Shape::kTilesN][4];

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < Shape::kTilesM; ++i) {
#pragma unroll
      for (int j = 0; j < Shape::kTilesN; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) of[i][j][e] = 0;
      }
    }
  }
  __device__ void add(const Sums& other) {
#pragma unroll
    for (int i = 0; i < Shape::kTilesM; ++i) {
#pragma unroll
      for (int j = 0; j < Shape::kTilesN; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) of[i][j][e] += other.of[i][j][e];
      }
    }
  }
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

/// Writes two neighbouring elements of c, or the first where the second is past its end.
template <class Element>
struct alignas(2 * sizeof(Element)) ElementPair {
  Element first;
  Element second;
};
template <class Element>
__device__ inline void store_pair(Element* to, float first, float second, bool both, bool pairs) {
  if (both && pairs) {
    *reinterpret_cast<ElementPair<Element>*>(to) = {rounded<Element>(first),
                                                    rounded<Element>(second)};
    return;
  }
  to[0] = rounded<Element>(first);
  if (both) to[1] = rounded<Element>(second);
}
/// The row and column of c of a thread's first sum.
template <class Shape>
__device__ inline std::int64_t first_row_of(const BlockTile& tile) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  return std::int64_t{tile.m} * Shape::kM + warp / Shape::kWarpsN * Shape::kWarpM +
         static_cast<int>(threadIdx.x) % 32 / 4;
}
template <class Shape>
__device__ inline std::int64_t first_column_of(const BlockTile& tile) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  return std::int64_t{tile.n} * Shape::kN + warp % Shape::kWarpsN * Shape::kWarpN +
         static_cast<int>(threadIdx.x) % 4 * 2;
}

/// Whether no row or column of the tile is past the end of c.
template <class Shape>
__device__ inline bool is_whole(const Product& product, const BlockTile& tile) {
  return (std::int64_t{tile.m} + 1) * Shape::kM <= product.m &&
         (std::int64_t{tile.n} + 1) * Shape::kN <= product.n;
}

/// Calls use(offset, first, second, both) with each pair of a thread's sums that is inside c: the
/// element of c in which it starts, and whether the second is inside, too. Without branches where
/// the tile is whole, so that what they read is on its way together: read, added and written one
/// after the other, a tile of 128 x 192 took 19 us.
template <class Shape, class Use>
__device__ inline void for_each_pair(const Product& product, const BlockTile& tile,
                                     Sums<Shape>& sums, const Use& use) {
  const std::int64_t row = first_row_of<Shape>(tile);
  const std::int64_t column = first_column_of<Shape>(tile);
  const std::int64_t start = first_result(product.c, tile) + row * product.c.stride + column;
  const bool whole = is_whole<Shape>(product, tile);
#pragma unroll
  for (int r = 0; r < 2 * Shape::kTilesM; ++r) {
    const std::int64_t offset = start + 8 * r * product.c.stride;
    const auto use_pair = [&](int j, bool both) {
      float(&four)[4] = sums.of[r / 2][j];
      use(offset + 8 * j, four[r % 2 * 2], four[r % 2 * 2 + 1], both);
    };
    if (whole) {
#pragma unroll
      for (int j = 0; j < Shape::kTilesN; ++j) {
        use_pair(j, true);
      }
    } else if (row + 8 * r < product.m) {
      const std::int64_t columns = product.n - column;
#pragma unroll
      for (int j = 0; j < Shape::kTilesN; ++j) {
        if (8 * j < columns) use_pair(j, 8 * j + 1 < columns);
      }
    }
  }
}

template <class Shape>
__device__ inline void add_bias(Sums<Shape>& sums, const Product& product, const BlockTile& tile) {
  if (product.bias.data == nullptr) return;
  const std::int64_t first_column = first_column_of<Shape>(tile);
  with_storage_type(product.bias.dtype, [&](auto zero) {
    const auto* const bias = static_cast<const decltype(zero)*>(product.bias.data) + first_column;
    const std::int64_t columns = product.n - first_column;
#pragma unroll
    for (int j = 0; j < Shape::kTilesN; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float added = 8 * j + e < columns ? upconvert<float>(bias[8 * j + e]) : 0;
#pragma unroll
        for (int i = 0; i < Shape::kTilesM; ++i) {
          sums.of[i][j][e] += added;
          sums.of[i][j][2 + e] += added;
        }
      }
    }
  });
}

/// Adds the f32 elements of c, or what is to be added in place of them.
template <class Shape>
__device__ inline void add_before(Sums<Shape>& sums, const Product& product,
                                  const BlockTile& tile) {
  const ProductResult& c = product.c;
  const float* const data = c.before != nullptr ? c.before : static_cast<const float*>(c.data);
  const auto add = [&](auto pairs) {
    for_each_pair(product, tile, sums,
                  [&](std::int64_t offset, float& first, float& second, bool both) {
                    if (decltype(pairs)::value && both) {
                      const auto pair = *reinterpret_cast<const ElementPair<float>*>(data + offset);
                      first += pair.first;
                      second += pair.second;
                    } else {
                      first += data[offset];
                      if (both) second += data[offset + 1];
                    }
                  });
  };
  c.pairs ? add(std::true_type{}) : add(std::false_type{});
}

/// c = sums, in c's dtype.
template <class Shape>
__device__ inline void store_sums(Sums<Shape>& sums, const Product& product,
                                  const BlockTile& tile) {
  const ProductResult& c = product.c;
  with_storage_type(c.dtype, [&](auto zero) {
    using Element = decltype(zero);
    auto* const data = static_cast<Element*>(c.data);
    for_each_pair(product, tile, sums,
                  [&](std::int64_t offset, float first, float second, bool both) {
                    store_pair(data + offset, first, second, both, c.pairs);
                  });
  });
}

/// c = sums + bias.
struct StoreSums {
  template <class Shape>
  __device__ static void write(const Product& product, const BlockTile& tile, Sums<Shape>& sums,
                               bool /*adds*/) {
    add_bias(sums, product, tile);
    store_sums(sums, product, tile);
  }
};

/// c += sums, or c = sums.
struct AddSums {
  template <class Shape>
  __device__ static void write(const Product& product, const BlockTile& tile, Sums<Shape>& sums,
                               bool adds) {
    if (adds) add_before(sums, product, tile);
    store_sums(sums, product, tile);
  }
};

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
