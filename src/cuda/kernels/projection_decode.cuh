// What the kernels of y = x W^T + b for few rows have in common.
//
// A block has some features and up to kRows rows. Its warps sum chunks of k: chunk_warps of them
// share kFeatures features, one or several chunks each, and with few chunks several such groups
// have features of their own. After each round the block adds the sums of its chunks in ascending
// order, the order of the kernels for many rows.
#pragma once

#include <cstdint>

#include "cuda/kernels/projection_product.cuh"

namespace ladon::cuda::projection {

struct DecodeParams {
  Product product;
  int chunk_warps;  // a divisor of the number of warps
};

template <int kWarpsOfBlock, int kFeaturesOfWarp, int kRowsOfBlock>
struct DecodeShape {
  static constexpr int kWarps = kWarpsOfBlock;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kFeatures = kFeaturesOfWarp;
  static constexpr int kRows = kRowsOfBlock;
  static constexpr int kOutputsPerThread = kWarps * kFeatures * kRows / kThreads;

  __host__ __device__ static std::int64_t block_features(int chunk_warps) {
    return kWarps / chunk_warps * kFeatures;
  }
};

/// The head, the first feature and the first row of a block. Blocks of the same features and other
/// rows are neighbours: they share W in L2.
struct DecodeBlock {
  std::int64_t head;
  std::int64_t feature;
  std::int64_t row;
};
template <class Shape>
__device__ inline DecodeBlock decode_block(const DecodeParams& params) {
  const std::int64_t features = Shape::block_features(params.chunk_warps);
  const std::int64_t row_blocks = ceil_div(params.product.m, Shape::kRows);
  const std::int64_t feature_blocks = ceil_div(params.product.n, features);
  const std::int64_t index = blockIdx.x / row_blocks;
  return {.head = index / feature_blocks,
          .feature = index % feature_blocks * features,
          .row = blockIdx.x % row_blocks * Shape::kRows};
}

/// An output of a block that a thread adds up.
struct DecodeOutput {
  int group;  // of warps that share its feature
  int feature;
  int row;
};
template <class Shape>
__device__ inline DecodeOutput output_at(int i) {
  const int index = static_cast<int>(threadIdx.x) + i * Shape::kThreads;
  return {.group = index / (Shape::kFeatures * Shape::kRows),
          .feature = index % Shape::kFeatures,
          .row = index / Shape::kFeatures % Shape::kRows};
}

/// Sums of a thread's outputs, over chunks.
template <class Shape, class Compute>
class DecodeTotals {
 public:
  /// Adds the sums of one round: sum_of(first_warp, chunk, output), for `chunks` of them.
  template <class SumOf>
  __device__ void add_round(int chunks, int chunk_warps, const SumOf& sum_of) {
#pragma unroll
    for (int i = 0; i < Shape::kOutputsPerThread; ++i) {
      const DecodeOutput output = output_at<Shape>(i);
      const int first_warp = output.group * chunk_warps;
      if (first_warp >= Shape::kWarps) continue;
      for (int chunk = 0; chunk < chunks; ++chunk) totals_[i] += sum_of(first_warp, chunk, output);
    }
  }

  /// y = totals + b.
  __device__ void store(const DecodeParams& params, const DecodeBlock& block) const {
    const Product& product = params.product;
    const ProductResult& c = product.c;
#pragma unroll
    for (int i = 0; i < Shape::kOutputsPerThread; ++i) {
      const DecodeOutput output = output_at<Shape>(i);
      const std::int64_t row = block.row + output.row;
      const std::int64_t column = block.feature + output.group * Shape::kFeatures + output.feature;
      if (output.group * params.chunk_warps >= Shape::kWarps) continue;
      if (row >= product.m || column >= product.n) continue;
      store_element(c.data, c.dtype, block.head * c.head_step + row * c.stride + column,
                    totals_[i] + bias_at<Compute>(product.bias, column));
    }
  }

 private:
  Compute totals_[Shape::kOutputsPerThread] = {};
};

/// Launches a kernel whose warps sum `warp_depth` values of k in a round.
template <class Shape>
void launch_decode(Queue& queue, void (*kernel)(DecodeParams), const Product& product,
                   std::int64_t warp_depth, std::size_t shared_bytes) {
  int chunk_warps = 1;
  while (chunk_warps < Shape::kWarps && chunk_warps * warp_depth < product.k) chunk_warps *= 2;
  const std::int64_t blocks = product.heads * ceil_div(product.m, Shape::kRows) *
                              ceil_div(product.n, Shape::block_features(chunk_warps));
  queue.launch(kernel,
               {.blocks = dim3(static_cast<unsigned>(blocks)),
                .threads = dim3(Shape::kThreads),
                .shared_bytes = shared_bytes},
               DecodeParams{product, chunk_warps});
}

}  // namespace ladon::cuda::projection
