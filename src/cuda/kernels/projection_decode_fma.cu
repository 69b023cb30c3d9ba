// y = x W^T + b in f32 or f64 by fused multiply-add, for few rows: dtypes that tensor cores do not
// take.
//
// A lane sums one chunk of k of one feature, for up to 8 rows of x: a warp has 8 features and 4
// chunks, and copies 16 values of k of each to shared memory, coalesced. The sums and their order
// are those of the kernel for many rows.
//
// The limit is the bandwidth of reading W, once for every 8 rows.
#include <cstdint>

#include "cuda/kernels/projection_decode.cuh"

namespace ladon::cuda::projection {
namespace {

constexpr int kWarps = 8;
constexpr int kRows = 8;
constexpr int kFeatures = 8;    // of one warp
constexpr int kLaneChunks = 4;  // of one warp
constexpr int kDepth = 16;      // values of k that are copied at once
static_assert(kFeatures * kLaneChunks == 32 && kRows == kFeatures);

using Shape = DecodeShape<kWarps, kFeatures, kRows>;

template <class Compute>
struct alignas(16) Four {
  Compute of[4];
};

/// 32 pairs of a row and a chunk, kDepth values of k each. A pair more 16 bytes apart than its
/// elements need keeps lanes in different banks.
template <class Compute>
struct PairTile {
  static constexpr int kPitch = kDepth + 16 / static_cast<int>(sizeof(Compute));
  alignas(16) Compute of[32][kPitch];

  __device__ const Four<Compute>& four(int pair, int k) const {
    return *reinterpret_cast<const Four<Compute>*>(&of[pair][k]);
  }
};

template <class Compute>
struct DecodeShared {
  PairTile<Compute> w[kWarps];  // pair: chunk * kFeatures + feature
  PairTile<Compute> x[kWarps];  // pair: chunk * kRows + row
  Compute sums[kWarps][32][kRows + 1];
};

/// Reads the pairs of one operand: half a warp has the consecutive k of one pair.
template <class Compute>
class PairReader {
 public:
  /// `first` is the operand's element at the block's first row and k = 0.
  __device__ PairReader(const ProductOperand& operand, std::int64_t first, std::int64_t rows)
      : operand_(operand), first_(first), rows_(rows) {}

  /// k in [k, k + kDepth) of the chunk, and the same of the next kLaneChunks - 1 chunks.
  __device__ void read(std::int64_t k, std::int64_t depth) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    with_storage_type(operand_.dtype, [&](auto zero) {
      using Element = decltype(zero);
      const auto* const data = static_cast<const Element*>(operand_.data) + first_;
#pragma unroll
      for (int i = 0; i < kRows; i += 2) {
        const int row = i + lane / kDepth;
        const std::int64_t at = k + lane % kDepth;
        const auto* const elements = data + row * operand_.stride + at;
#pragma unroll
        for (int chunk = 0; chunk < kLaneChunks; ++chunk) {
          const int ahead = chunk * kFmaChunk;
          values_[chunk][i / 2] =
              row < rows_ && at + ahead < depth ? upconvert<Compute>(elements[ahead]) : Compute{0};
        }
      }
    });
  }

  __device__ void store(PairTile<Compute>& tile) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int chunk = 0; chunk < kLaneChunks; ++chunk) {
#pragma unroll
      for (int i = 0; i < kRows; i += 2) {
        tile.of[chunk * kRows + i + lane / kDepth][lane % kDepth] = values_[chunk][i / 2];
      }
    }
  }

 private:
  const ProductOperand& operand_;
  std::int64_t first_;
  std::int64_t rows_;
  Compute values_[kLaneChunks][kRows / 2];
};

/// An operand, by way of a warp's tile.
template <class Compute>
struct PairStream {
  PairReader<Compute>& reader;
  PairTile<Compute>& tile;
};

/// The sums of a lane's chunk for each of `rows` rows, from `k` of `depth` on.
template <class Compute>
__device__ inline void sum_chunk(Compute (&sums)[kRows], const PairStream<Compute>& w,
                                 const PairStream<Compute>& x, std::int64_t k, std::int64_t depth,
                                 int rows) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  w.reader.read(k, depth);
  x.reader.read(k, depth);
#pragma unroll 1
  for (int done = 0; done < kFmaChunk; done += kDepth) {
    __syncwarp();  // all lanes have used up the last tiles
    w.reader.store(w.tile);
    x.reader.store(x.tile);
    __syncwarp();
    if (done + kDepth < kFmaChunk) {
      w.reader.read(k + done + kDepth, depth);
      x.reader.read(k + done + kDepth, depth);
    }
#pragma unroll
    for (int i = 0; i < kDepth; i += 4) {
      const Four<Compute> weights = w.tile.four(lane, i);
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        if (row >= rows) break;
        const Four<Compute> inputs = x.tile.four(lane / kFeatures * kRows + row, i);
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[row] = fma(inputs.of[e], weights.of[e], sums[row]);
      }
    }
  }
}

template <class Compute>
__global__ void __launch_bounds__(Shape::kThreads, sizeof(Compute) == 4 ? 2 : 1)
    decode_fma(const __grid_constant__ DecodeParams params) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<DecodeShared<Compute>*>(memory);
  wait_for_kernel_before();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int chunk_warps = params.chunk_warps;
  const DecodeBlock block = decode_block<Shape>(params);
  const Product& product = block.product;
  const std::int64_t feature = block.feature + warp / chunk_warps * kFeatures;
  PairReader<Compute> w(product.b, first_element(product.b, block.head, feature, 0),
                        product.n - feature);
  PairReader<Compute> x(product.a, first_element(product.a, block.head, block.row, 0),
                        product.m - block.row);
  const int rows = static_cast<int>(min(product.m - block.row, std::int64_t{kRows}));
  const std::int64_t chunks = ceil_div(product.k, kFmaChunk);
  const std::int64_t round_chunks = chunk_warps * kLaneChunks;

  DecodeTotals<Shape, Compute> totals;
#pragma unroll 1
  for (std::int64_t chunk = 0; chunk < chunks; chunk += round_chunks) {
    Compute sums[kRows] = {};
    const std::int64_t k = (chunk + warp % chunk_warps * kLaneChunks) * kFmaChunk;
    if (k < product.k && feature < product.n) {
      sum_chunk<Compute>(sums, {w, shared.w[warp]}, {x, shared.x[warp]}, k, product.k, rows);
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) shared.sums[warp][lane][row] = sums[row];
    __syncthreads();
    totals.add_round(static_cast<int>(min(chunks - chunk, round_chunks)), chunk_warps,
                     [&](int first_warp, int c, const DecodeOutput& output) {
                       return shared.sums[first_warp + c / kLaneChunks]
                                         [c % kLaneChunks * kFeatures + output.feature][output.row];
                     });
    __syncthreads();
  }
  start_kernel_after();
  totals.store(params, block);
}

template <class Compute>
void launch_compute(Queue& queue, std::span<const Product> products) {
  launch_decode<Shape>(queue, decode_fma<Compute>, products, kLaneChunks * kFmaChunk,
                       sizeof(DecodeShared<Compute>));
}

}  // namespace

void launch_fma_decode(Queue& queue, std::span<const Product> products) {
  if (products[0].a.dtype == DType::kF64 || products[0].b.dtype == DType::kF64) {
    return launch_compute<double>(queue, products);
  }
  return launch_compute<float>(queue, products);
}

}  // namespace ladon::cuda::projection
