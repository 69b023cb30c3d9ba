// Products in f32 or f64 by fused multiply-add: operands of f32 and f64, and of mixed dtypes.
//
// A block of 256 threads computes a square tile of c, each thread 8x8 or 4x4 elements of it. Tiles
// of 16 values of k are converted to the compute type in registers while the last ones, in shared
// memory, are multiplied.
//
// 2 m n k flops; with 8x8 elements a thread reads 64 bytes of shared memory for 64 FMAs, so that
// f32 is limited by the FMA units. f64 has half as many or far fewer.
#include <cstdint>

#include "cuda/kernels/projection_product.cuh"

namespace ladon::cuda::projection {
namespace {

constexpr int kThreads = 256;
constexpr int kDepth = 16;  // values of k in a tile
constexpr int kLanes = 16;  // threads along each side of c's tile

/// Four neighbours, read at once.
template <class Compute>
struct alignas(16) Four {
  Compute of[4];
};

/// A thread has kPerThread rows: four neighbours out of every 64.
template <class Compute, int kPerThread>
struct FmaTile {
  static constexpr int kSide = kLanes * kPerThread;
  static constexpr int kPitch = kSide + 4;

  struct Shared {
    // [buffer][operand][k][row]
    alignas(16) Compute tiles[2][2][kDepth][kPitch];
  };

  __device__ static int row_of(int lane, int i) { return i / 4 * (4 * kLanes) + lane * 4 + i % 4; }
};

/// A thread's share of reading one operand's tiles. Neighbouring threads read neighbouring
/// elements.
template <class Compute, int kPerThread>
class TileReader {
  using Tile = FmaTile<Compute, kPerThread>;

 public:
  __device__ TileReader(const ProductOperand& operand, std::int64_t first, std::int64_t rows)
      : operand_(operand), rows_(rows) {
    const int thread = static_cast<int>(threadIdx.x);
    row_ = operand.along_k ? thread / kDepth : thread % Tile::kSide;
    k_ = operand.along_k ? thread % kDepth : thread / Tile::kSide;
    first_ = first + (operand.along_k ? row_ * operand.stride + k_ : k_ * operand.stride + row_);
  }

  /// Reads the tile of k in [k, k + kDepth); 0 past the last row and from `depth` on.
  __device__ void read(std::int64_t k, std::int64_t depth) {
    const bool along_k = operand_.along_k;
    const std::int64_t tile = first_ + (along_k ? k : k * operand_.stride);
    const std::int64_t step =
        (along_k ? kThreads / kDepth : kThreads / Tile::kSide) * operand_.stride;
    with_storage_type(operand_.dtype, [&](auto zero) {
      using Element = decltype(zero);
      const auto* const data = static_cast<const Element*>(operand_.data) + tile;
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        const bool valid = row_at(i) < rows_ && k + k_at(i) < depth;
        values_[i] = valid ? upconvert<Compute>(data[i * step]) : Compute{0};
      }
    });
  }

  __device__ void store(Compute (&tile)[kDepth][Tile::kPitch]) const {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) tile[k_at(i)][row_at(i)] = values_[i];
  }

 private:
  __device__ int row_at(int i) const {
    return operand_.along_k ? row_ + i * (kThreads / kDepth) : row_;
  }
  __device__ int k_at(int i) const {
    return operand_.along_k ? k_ : k_ + i * (kThreads / Tile::kSide);
  }

  const ProductOperand& operand_;
  std::int64_t rows_;
  std::int64_t first_;
  int row_;
  int k_;
  Compute values_[kPerThread];
};

template <class Compute, int kPerThread>
struct FmaSums {
  Compute of[kPerThread][kPerThread];

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) of[i][j] = 0;
    }
  }
  __device__ void add(const FmaSums& other) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) of[i][j] += other.of[i][j];
    }
  }
};

/// sums += the product of two tiles in shared memory.
template <class Compute, int kPerThread>
__device__ inline void multiply_buffer(
    FmaSums<Compute, kPerThread>& sums,
    const Compute (&tiles)[2][kDepth][FmaTile<Compute, kPerThread>::kPitch]) {
  const int lane_m = static_cast<int>(threadIdx.x) / kLanes;
  const int lane_n = static_cast<int>(threadIdx.x) % kLanes;
  constexpr int kFours = kPerThread / 4;
#pragma unroll 4
  for (int k = 0; k < kDepth; ++k) {
    Four<Compute> a[kFours], b[kFours];
#pragma unroll
    for (int f = 0; f < kFours; ++f) {
      using Tile = FmaTile<Compute, kPerThread>;
      a[f] = *reinterpret_cast<const Four<Compute>*>(&tiles[0][k][Tile::row_of(lane_m, 4 * f)]);
      b[f] = *reinterpret_cast<const Four<Compute>*>(&tiles[1][k][Tile::row_of(lane_n, 4 * f)]);
    }
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) {
        sums.of[i][j] = fma(a[i / 4].of[i % 4], b[j / 4].of[j % 4], sums.of[i][j]);
      }
    }
  }
}

/// totals = the product over k in [0, depth), chunk by chunk. Called by all threads of a block.
template <class Compute, int kPerThread>
__device__ inline void multiply_tiles(FmaSums<Compute, kPerThread>& totals,
                                      TileReader<Compute, kPerThread>& a,
                                      TileReader<Compute, kPerThread>& b, std::int64_t depth,
                                      typename FmaTile<Compute, kPerThread>::Shared& shared) {
  FmaSums<Compute, kPerThread> chunk;
  chunk.clear();
  totals.clear();
  a.read(0, depth);
  b.read(0, depth);
  int buffer = 0;
#pragma unroll 1
  for (std::int64_t k = 0; k < depth; k += kDepth) {
    auto& tiles = shared.tiles[buffer];
    a.store(tiles[0]);
    b.store(tiles[1]);
    // Also says that everyone has used up the other buffer, which the next tiles go to.
    __syncthreads();
    if (k + kDepth < depth) {
      a.read(k + kDepth, depth);
      b.read(k + kDepth, depth);
    }
    multiply_buffer<Compute, kPerThread>(chunk, tiles);
    if ((k + kDepth) % kFmaChunk == 0 || k + kDepth >= depth) {
      totals.add(chunk);
      chunk.clear();
    }
    buffer ^= 1;
  }
}

/// c = sums + bias, or c += sums.
template <class Compute, int kPerThread>
__device__ inline void write_sums(const Product& product, const BlockTile& tile,
                                  const FmaSums<Compute, kPerThread>& sums, bool adds) {
  using Tile = FmaTile<Compute, kPerThread>;
  const int lane_m = static_cast<int>(threadIdx.x) / kLanes;
  const int lane_n = static_cast<int>(threadIdx.x) % kLanes;
  const ProductResult& c = product.c;
  with_storage_type(c.dtype, [&](auto zero) {
    using Element = decltype(zero);
    auto* const data = static_cast<Element*>(c.data) + first_result(c, tile);
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const std::int64_t column = std::int64_t{tile.n} * Tile::kSide + Tile::row_of(lane_n, j);
      if (column >= product.n) continue;
      const Compute bias = bias_at<Compute>(product.bias, column);
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        const std::int64_t row = std::int64_t{tile.m} * Tile::kSide + Tile::row_of(lane_m, i);
        if (row >= product.m) continue;
        Element& to = data[row * c.stride + column];
        const Compute before = adds ? upconvert<Compute>(to) : Compute{0};
        to = rounded<Element>(before + (sums.of[i][j] + bias));
      }
    }
  });
}

template <class Compute, int kPerThread>
__global__ void __launch_bounds__(kThreads) multiply_fma(const __grid_constant__ Product product) {
  using Tile = FmaTile<Compute, kPerThread>;
  __shared__ typename Tile::Shared shared;
  const BlockTile tile = tile_at(product, blockIdx.x, Tile::kSide, Tile::kSide);
  const std::int64_t row_a = std::int64_t{tile.m} * Tile::kSide;
  const std::int64_t row_b = std::int64_t{tile.n} * Tile::kSide;
  bool adds = product.c.adds;
  std::int64_t k = tile.k_begin(product);
  do {
    FmaSums<Compute, kPerThread> totals;
    TileReader<Compute, kPerThread> a(product.a, first_element(product.a, tile.head, row_a, k),
                                      product.m - row_a);
    TileReader<Compute, kPerThread> b(product.b, first_element(product.b, tile.head, row_b, k),
                                      product.n - row_b);
    multiply_tiles<Compute, kPerThread>(totals, a, b,
                                        min(tile.k_end(product) - k, product.longest_sum), shared);
    write_sums(product, tile, totals, adds);
    adds = true;
    k += product.longest_sum;
    __syncthreads();  // the next sum's tiles overwrite the buffers
  } while (k < tile.k_end(product));
}

template <class Compute, int kPerThread>
void launch_tile(Queue& queue, const Product& product) {
  constexpr int kSide = FmaTile<Compute, kPerThread>::kSide;
  const std::int64_t blocks = num_tiles(product, kSide, kSide) * product.heads * product.splits;
  queue.launch(multiply_fma<Compute, kPerThread>,
               {.blocks = dim3(static_cast<unsigned>(blocks)), .threads = dim3(kThreads)}, product);
}

}  // namespace

void launch_fma(Queue& queue, const Product& product) {
  if (product.a.dtype == DType::kF64 || product.b.dtype == DType::kF64) {
    return launch_tile<double, 4>(queue, product);
  }
  const bool large = product.splits == 1 && fills_gpu(queue, product, FmaTile<float, 8>::kSide);
  return large ? launch_tile<float, 8>(queue, product) : launch_tile<float, 4>(queue, product);
}

}  // namespace ladon::cuda::projection
