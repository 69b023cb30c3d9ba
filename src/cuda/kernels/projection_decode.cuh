// What the kernels of y = x W^T + b for few rows have in common.
//
// Several projections of as many rows and as long a k run as one launch: q, k and v of a layer.
//
// A block has some features of one of them and up to kRows rows. Its warps sum chunks of k:
// chunk_warps of them share kFeatures features, one or several chunks each, and with few chunks
// several such groups have separate features. After each round the block adds the sums of its
// chunks in ascending order, the order of the kernels for many rows.
#pragma once

#include <cstdint>
#include <span>

#include "cuda/kernels/dependent_launch.cuh"
#include "cuda/kernels/projection_product.cuh"

namespace ladon::cuda::projection {

struct DecodeParams {
  Product products[kMostProducts];          // of one m, k and dtype
  std::int64_t blocks[kMostProducts] = {};  // of each; 0 where there is none
  int chunk_warps = 1;                      // a divisor of the number of warps
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

/// The product, the head, the first feature and the first row of a block. Blocks of the same
/// features and other rows are neighbours: they share W in L2.
struct DecodeBlock {
  const Product& product;
  std::int64_t head;
  std::int64_t feature;
  std::int64_t row;
};
template <class Shape>
__device__ inline DecodeBlock decode_block(const DecodeParams& params) {
  int which = 0;
  std::int64_t number = blockIdx.x;
  while (which < kMostProducts - 1 && number >= params.blocks[which]) {
    number -= params.blocks[which++];
  }
  const Product& product = params.products[which];
  const auto features = static_cast<unsigned>(Shape::block_features(params.chunk_warps));
  const auto row_blocks = static_cast<unsigned>(ceil_div(product.m, Shape::kRows));
  const auto feature_blocks = static_cast<unsigned>(ceil_div(product.n, features));
  const auto block = static_cast<unsigned>(number);
  const unsigned index = block / row_blocks;
  return {.product = product,
          .head = index / feature_blocks,
          .feature = index % feature_blocks * features,
          .row = block % row_blocks * Shape::kRows};
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
    const Product& product = block.product;
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
void launch_decode(Queue& queue, void (*kernel)(DecodeParams), std::span<const Product> products,
                   std::int64_t warp_depth, std::size_t shared_bytes) {
  DecodeParams params;
  while (params.chunk_warps < Shape::kWarps &&
         params.chunk_warps * warp_depth < products.front().k) {
    params.chunk_warps *= 2;
  }
  std::int64_t blocks = 0;
  for (std::size_t i = 0; i < products.size(); ++i) {
    const Product& product = products[i];
    params.products[i] = product;
    params.blocks[i] = product.heads * ceil_div(product.m, Shape::kRows) *
                       ceil_div(product.n, Shape::block_features(params.chunk_warps));
    blocks += params.blocks[i];
  }
  queue.launch(kernel,
               {.blocks = dim3(static_cast<unsigned>(blocks)),
                .threads = dim3(Shape::kThreads),
                .shared_bytes = shared_bytes,
                .starts_early = true},
               params);
}

}  // namespace ladon::cuda::projection
