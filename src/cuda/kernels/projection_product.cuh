// A projection or one of its gradients as a product of two matrices, which is how its kernels take
// it:
//
//   c[m][n] = bias[n] + sum over k of a[m][k] * b[n][k],    or    c[m][n] += the sum,
//   or, to round what several products have summed, c[m][n] = before[m][n] + the sum
//
//                       m              n              k              a     b
//   project             rows           out_features   in_features    x     w
//   input gradient      rows           in_features    out_features   dy    w transposed
//   weight gradient     out_features   in_features    rows           dy    x, both transposed
//
// Order of summation, the same in every kernel of a dtype, whatever its tiles. Products of
// consecutive k are summed in chunks, each from 0 on with k ascending; the sums of chunks are added
// in ascending order. c[m][n] then depends on its row of a, its row of b and k alone. Kernels for
// many rows, for few rows and for rows that are not aligned agree to the bit.
//
//   Tensor cores: chunks of 256, in steps of 16. The instruction truncates where it aligns its
//   terms, up to 1 epsilon a step, so n equal terms are summed within n / 32 epsilons, and rounded
//   additions of n / chunk sums within n / chunk / 4. 256 is near the best of the two for n of 4096
//   to 16384: 12 and 24 epsilons, below the 32 of docs/numerics.md.
//   FMA: chunks of 128.
//
// Weight gradients have no limit on k: they add to c after every 8192.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "core/integer.h"
#include "core/projection_params.h"
#include "cuda/kernels/element.cuh"
#include "cuda/queue.h"

namespace ladon::cuda::projection {

inline constexpr int kTensorCoreChunk = 256;
inline constexpr int kFmaChunk = 128;
inline constexpr std::int64_t kLongestSum = 8192;

struct ProductOperand {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  bool along_k = true;      // elements of consecutive k are contiguous; else those of rows are
  bool vectors = false;     // contiguous elements are aligned to 16 bytes, and a multiple of that
  std::int64_t stride = 0;  // between rows, or between values of k
  std::int64_t head_step = 0;
};

struct ProductResult {
  void* data = nullptr;
  DType dtype = DType::kF32;
  bool adds = false;
  bool pairs = false;   // stores of two elements are aligned
  bool chunks = false;  // c is 16-bit, and its rows are aligned chunks of 16 bytes
  std::int64_t stride = 0;
  std::int64_t head_step = 0;
  std::int64_t split_step = 0;
  // Tensor cores only: f32 sums with the same strides that are added to instead, where c is 16-bit.
  const float* before = nullptr;
};

struct Product {
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  std::int64_t heads = 1;
  ProductOperand a{};
  ProductOperand b{};
  ProductResult c{};
  Matrix bias{};
  // Splits of k have results of their own.
  std::int64_t splits = 1;
  std::int64_t split_depth = 0;
  std::int64_t longest_sum = 0;  // added to c at a time
};

/// Products of one k and dtype that a kernel computes at once.
inline constexpr std::size_t kMostProducts = 4;

// Each launches the kernels of one kind of product. m, n or heads of 0 is legal.
/// 16-bit operands of one dtype.
void launch_tensor_core_forward(Queue& queue, std::span<const Product> products);
void launch_tensor_core_input_gradient(Queue& queue, const Product& product);
void launch_tensor_core_weight_gradients(Queue& queue, std::span<const Product> products);
void launch_tensor_core_decode(Queue& queue, std::span<const Product> products);
/// Operands of any dtypes, along k or not; f64 where one of them is.
void launch_fma(Queue& queue, const Product& product);
void launch_fma_decode(Queue& queue, std::span<const Product> products);

/// c[m][n] += partials[0][m][n] + partials[1][m][n] + ..., where `product` has written the partials
/// as its result.
void launch_add_partials(Queue& queue, const Product& product, const ProductResult& c);
/// Column sums of dy: db += sum of dy's rows.
void launch_bias_gradient(Queue& queue, const ProjectionParams& params);

/// f32 elements as the sum of three bf16 parts, exactly: part 0 has the upper 8 bits of the
/// mantissa, part 2 the lowest.
struct Bf16Part {
  const float* from = nullptr;
  __nv_bfloat16* to = nullptr;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t from_stride = 0;
  std::int64_t to_stride = 0;  // columns past the last are set to 0
  int part = 0;
};
void launch_bf16_part(Queue& queue, const Bf16Part& params);

inline std::int64_t num_tiles(const Product& product, std::int64_t tile_m, std::int64_t tile_n) {
  return ceil_div(product.m, tile_m) * ceil_div(product.n, tile_n);
}

/// Whether tiles of this size are enough to give every SM one, and are not mostly padding.
inline bool fills_gpu(const Queue& queue, const Product& product, std::int64_t tile) {
  return product.m > tile / 2 && product.n > tile / 2 &&
         num_tiles(product, tile, tile) * product.heads >= queue.num_multiprocessors();
}

/// The part of a product that a block computes: one tile of c, for one head and split.
struct BlockTile {
  unsigned head;
  unsigned split;
  unsigned m;  // tiles
  unsigned n;

  __device__ std::int64_t k_begin(const Product& product) const {
    return split * product.split_depth;
  }
  __device__ std::int64_t k_end(const Product& product) const {
    return min((split + 1) * product.split_depth, product.k);
  }
};

/// Consecutive blocks walk down bands of eight tiles, so that the blocks that run at one time share
/// rows of a and of b in L2. A grid has fewer than 2^31 blocks.
__device__ inline BlockTile tile_at(const Product& product, unsigned block, int tile_m,
                                    int tile_n) {
  constexpr unsigned kBand = 8;
  const auto tiles_m = static_cast<unsigned>(ceil_div(product.m, tile_m));
  const auto tiles_n = static_cast<unsigned>(ceil_div(product.n, tile_n));
  const auto splits = static_cast<unsigned>(product.splits);
  const unsigned outer = block / (tiles_m * tiles_n);
  const unsigned index = block % (tiles_m * tiles_n);
  const unsigned band = index / (kBand * tiles_n);
  const unsigned in_band = index % (kBand * tiles_n);
  const unsigned height = min(kBand, tiles_m - band * kBand);
  return {.head = outer / splits,
          .split = outer % splits,
          .m = band * kBand + in_band % height,
          .n = in_band / height};
}

/// The element of an operand in which a block's tile begins.
__device__ inline std::int64_t first_element(const ProductOperand& operand, std::int64_t head,
                                             std::int64_t row, std::int64_t k) {
  return head * operand.head_step +
         (operand.along_k ? row * operand.stride + k : k * operand.stride + row);
}

__device__ inline std::int64_t first_result(const ProductResult& c, const BlockTile& tile) {
  return tile.head * c.head_step + tile.split * c.split_step;
}

/// bias[column], or 0 where there is no bias.
template <class Compute>
__device__ inline Compute bias_at(const Matrix& bias, std::int64_t column) {
  return bias.data == nullptr ? Compute{0} : load_element<Compute>(bias.data, bias.dtype, column);
}

/// An element's value in the compute type.
template <class Compute, class Element>
__device__ inline Compute upconvert(Element element) {
  if constexpr (sizeof(Element) >= sizeof(float)) {
    return static_cast<Compute>(element);
  } else {
    return static_cast<Compute>(to_float(element));
  }
}

/// Rounds once, to nearest even.
template <class Element, class Compute>
__device__ inline Element rounded(Compute value) {
  if constexpr (sizeof(Element) >= sizeof(float)) {
    return static_cast<Element>(value);
  } else {
    float narrowed;
    if constexpr (sizeof(Compute) == 8) {
      narrowed = detail::round_to_odd(value);
    } else {
      narrowed = value;
    }
    if constexpr (std::is_same_v<Element, __half>) {
      return __float2half_rn(narrowed);
    } else {
      return __float2bfloat16_rn(narrowed);
    }
  }
}

}  // namespace ladon::cuda::projection
