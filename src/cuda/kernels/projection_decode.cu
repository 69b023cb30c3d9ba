// y = x W^T + b of 16-bit x and W for few rows, by tensor cores: W is the operand of 16 rows, x
// that of 8 columns. The sums and their order are those of the kernel for many rows, with the
// operands exchanged, which gives the same bits.
//
// A warp sums one chunk of k in a round, for 16 features and up to 16 rows of x. It has its own
// stages of shared memory, so that it waits for no other warp while it reads.
//
// 2 * out * in bytes of W, read once for every 8 or 16 rows: the limit is memory bandwidth. The
// blocks on an SM have 48 KiB of W in flight, more than 4.8 TB/s need at a latency of 0.8 us. A
// shape of 64 rows and 32 features of a warp was slower than tiles (projection_mma.cuh).
#include "cuda/kernels/projection_decode.cuh"
#include "cuda/kernels/projection_tiles.cuh"

namespace ladon::cuda::projection {
namespace {

constexpr int kTilesPerChunk = kTensorCoreChunk / kTileK;

constexpr int kWarps = 8;
constexpr int kFeatures = 16;  // of one warp

/// For 8 or 16 rows.
template <int kTilesOf8Rows, int kBlocksOfSm>
struct TensorCoreShape : DecodeShape<kWarps, kFeatures, 8 * kTilesOf8Rows> {
  using Base = DecodeShape<kWarps, kFeatures, 8 * kTilesOf8Rows>;
  static constexpr int kRowTiles = kTilesOf8Rows;
  static constexpr int kStages = 2;
  static constexpr int kBlocks = kBlocksOfSm;
  static constexpr int kWBytes = kTileBytes<kFeatures>;  // of a stage
  static constexpr int kStageBytes = kWBytes + kTileBytes<Base::kRows>;
  // The lanes of a warp write 4 rows and 8 features at once: with this pitch to 32 banks.
  static constexpr int kSumPitch = kFeatures + 4;

  struct Shared {
    alignas(128) unsigned char stages[kWarps][kStages][kStageBytes];

    /// A warp's sums of a chunk, in the stage of the chunk's last tile.
    using Sums = float[Base::kRows][kSumPitch];
    __device__ Sums& sums(int warp) {
      return *reinterpret_cast<Sums*>(stages[warp][(kTilesPerChunk - 1) % kStages]);
    }
    static_assert(sizeof(Sums) <= kStageBytes && kTilesPerChunk % kStages == 0);
  };
};
// Three blocks on an SM, so that q, k and v of a layer with 4096 and twice 1024 features are one
// wave of 384 blocks. All within the 99 KiB that every GPU has.
using FewRows = TensorCoreShape<1, 3>;
using SomeRows = TensorCoreShape<2, 2>;

__device__ inline OperandRows rows_of(const ProductOperand& operand, std::int64_t head,
                                      std::int64_t row, std::int64_t rows, std::int64_t depth) {
  return {.data = static_cast<const std::uint16_t*>(operand.data) +
                  first_element(operand, head, row, 0),
          .stride = operand.stride,
          .rows = rows - row,
          .depth = depth,
          .vectors = operand.vectors};
}

/// The tiles of W and x that one warp multiplies: of its chunk of the first round, then of the
/// second, and so on. Tiles past the end of k are left out.
template <class Shape>
class WarpTiles {
 public:
  __device__ WarpTiles(const DecodeParams& params, const DecodeBlock& block, std::int64_t feature,
                       std::uint32_t stages, int warp, int lane)
      : copy_w_(rows_of(block.product.b, block.head, feature, block.product.n, block.product.k),
                lane),
        copy_x_(rows_of(block.product.a, block.head, block.row, block.product.m, block.product.k),
                lane),
        stages_(stages),
        // A warp past the last feature reads nothing, but takes part in the block's barriers.
        end_(feature < block.product.n ? static_cast<int>(ceil_div(block.product.k, kTileK)) : 0),
        chunk_warps_(params.chunk_warps),
        chunk_(warp % params.chunk_warps) {
    copy_w_.advance(chunk_ * kTilesPerChunk);
    copy_x_.advance(chunk_ * kTilesPerChunk);
  }

  __device__ bool has(int i) const {
    const int chunk = i / kTilesPerChunk * chunk_warps_ + chunk_;
    return chunk * kTilesPerChunk + i % kTilesPerChunk < end_;
  }
  __device__ std::uint32_t stage(int i) const {
    return stages_ + i % Shape::kStages * Shape::kStageBytes;
  }
  /// Starts the copies of tile i; called for 0, 1, 2, ... Always commits, so that the number of
  /// groups tells which tiles have arrived.
  __device__ void start_copies(int i) {
    if (has(i)) {
      copy_w_.start(stage(i));
      copy_x_.start(stage(i) + Shape::kWBytes);
      const bool last_of_chunk = i % kTilesPerChunk == kTilesPerChunk - 1;
      const int step = last_of_chunk ? (chunk_warps_ - 1) * kTilesPerChunk + 1 : 1;
      copy_w_.advance(step);
      copy_x_.advance(step);
    }
    commit_copies();
  }

 private:
  TileCopy<kFeatures, true, 32> copy_w_;
  TileCopy<Shape::kRows, true, 32> copy_x_;
  std::uint32_t stages_;
  int end_;
  int chunk_warps_;
  int chunk_;
};

/// sums[16 features][8 rows each] += one stage's tiles of W and x.
template <class Element, int kRowTiles>
__device__ inline void multiply_stage(float (&sums)[kRowTiles][4], std::uint32_t stage, int lane) {
  const std::uint32_t x_tile = stage + kTileBytes<kFeatures>;
#pragma unroll
  for (int step = 0; step < kTileK / kStepK; step += 2) {
    std::uint32_t w[2][4];
    load_a<kFeatures, true>(w[0], stage, 0, step, lane);
    load_a<kFeatures, true>(w[1], stage, 0, step + 1, lane);
    if constexpr (kRowTiles == 1) {
      std::uint32_t x[4];
      load_b_of_two_steps(x, x_tile, step, lane);
      multiply_add<Element>(sums[0], w[0], x[0], x[1]);
      multiply_add<Element>(sums[0], w[1], x[2], x[3]);
    } else {
      std::uint32_t x[2][4];
      load_b<8 * kRowTiles, true>(x[0], x_tile, 0, step, lane);
      load_b<8 * kRowTiles, true>(x[1], x_tile, 0, step + 1, lane);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        multiply_add<Element>(sums[0], w[i], x[i][0], x[i][1]);
        multiply_add<Element>(sums[1], w[i], x[i][2], x[i][3]);
      }
    }
  }
}

template <class Element, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    decode_tensor_core(const __grid_constant__ DecodeParams params) {
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Shape::Shared*>(memory);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int chunk_warps = params.chunk_warps;
  const DecodeBlock block = decode_block<Shape>(params);
  WarpTiles<Shape> tiles(params, block, block.feature + warp / chunk_warps * kFeatures,
                         shared_address(shared.stages[warp]), warp, lane);
  wait_for_kernel_before();
  for (int i = 0; i < Shape::kStages - 1; ++i) tiles.start_copies(i);

  const int chunks = static_cast<int>(ceil_div(block.product.k, kTensorCoreChunk));
  DecodeTotals<Shape, float> totals;
#pragma unroll 1
  for (int round = 0; round * chunk_warps < chunks; ++round) {
    float sums[Shape::kRowTiles][4] = {};
#pragma unroll 1
    for (int i = round * kTilesPerChunk; i < (round + 1) * kTilesPerChunk; ++i) {
      wait_for_copies<Shape::kStages - 2>();
      __syncwarp();  // all lanes' copies of this tile are there, and the last tile is used up
      tiles.start_copies(i + Shape::kStages - 1);
      if (tiles.has(i)) multiply_stage<Element, Shape::kRowTiles>(sums, tiles.stage(i), lane);
    }
#pragma unroll
    for (int t = 0; t < Shape::kRowTiles; ++t) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        shared.sums(warp)[8 * t + lane % 4 * 2 + e % 2][lane / 4 + e / 2 * 8] = sums[t][e];
      }
    }
    __syncthreads();
    totals.add_round(min(chunks - round * chunk_warps, chunk_warps), chunk_warps,
                     [&](int first_warp, int chunk, const DecodeOutput& output) {
                       return shared.sums(first_warp + chunk)[output.row][output.feature];
                     });
    __syncthreads();  // the next tiles overwrite the sums
  }
  start_kernel_after();
  totals.store(params, block);
}

template <class Element, class Shape>
void launch_shape(Queue& queue, std::span<const Product> products) {
  launch_decode<Shape>(queue, decode_tensor_core<Element, Shape>, products, kTensorCoreChunk,
                       sizeof(typename Shape::Shared));
}

template <class Element>
void launch_rows(Queue& queue, std::span<const Product> products) {
  const std::int64_t rows = products.front().m;
  if (rows <= FewRows::kRows) return launch_shape<Element, FewRows>(queue, products);
  return launch_shape<Element, SomeRows>(queue, products);
}

}  // namespace

void launch_tensor_core_decode(Queue& queue, std::span<const Product> products) {
  products.front().a.dtype == DType::kF16 ? launch_rows<__half>(queue, products)
                                          : launch_rows<__nv_bfloat16>(queue, products);
}

}  // namespace ladon::cuda::projection
