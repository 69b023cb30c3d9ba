// Projections and their gradients: each as a product of matrices, and the kernel that computes it.
//
//   operands                       kernel
//   both f16, or both bf16         tensor cores
//   dy f32, w and x bf16           tensor cores, once for each of three bf16 parts of dy
//   all others                     FMA in f32, or in f64 where an operand is
//
// dy is f32 next to bf16 weights where a layer sums gradients before it projects them back. Three
// bf16 parts hold an f32 element exactly. A part of 0 times an infinite weight is NaN, where the
// whole would be infinite. f16 has no such form: f32 gradients exceed its range.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "cuda/hopper/multiply_rows.h"
#include "cuda/kernels/projection_product.cuh"
#include "cuda/operations.h"
#include "ladon/tensor_view.h"

namespace ladon::cuda {

using namespace projection;

namespace {

bool is_16_bit(DType dtype) { return size_of(dtype) == 2; }

/// Whether an address and all steps from it are multiples of `bytes`.
bool is_aligned(const void* data, DType dtype, std::int64_t stride, std::int64_t head_step,
                std::size_t bytes) {
  const auto size = static_cast<std::uint64_t>(size_of(dtype));
  const std::uint64_t all = reinterpret_cast<std::uintptr_t>(data) |
                            static_cast<std::uint64_t>(stride) * size |
                            static_cast<std::uint64_t>(head_step) * size;
  return all % bytes == 0;
}

/// A matrix with `columns` of contiguous elements, which are those of k or not.
ProductOperand operand_of(const Matrix& matrix, std::int64_t columns, std::int64_t head_step,
                          bool along_k) {
  constexpr std::int64_t kChunk = 16;  // bytes
  return {.data = matrix.data,
          .dtype = matrix.dtype,
          .along_k = along_k,
          .vectors = is_aligned(matrix.data, matrix.dtype, matrix.stride, head_step, kChunk) &&
                     columns * static_cast<std::int64_t>(size_of(matrix.dtype)) % kChunk == 0,
          .stride = matrix.stride,
          .head_step = head_step};
}

ProductResult result_of(const Matrix& matrix, std::int64_t columns, std::int64_t head_step,
                        bool adds) {
  const auto aligned_to = [&](std::size_t bytes) {
    return is_aligned(matrix.data, matrix.dtype, matrix.stride, head_step, bytes);
  };
  return {.data = matrix.data,
          .dtype = matrix.dtype,
          .adds = adds,
          .pairs = aligned_to(2 * size_of(matrix.dtype)),
          .chunks = is_16_bit(matrix.dtype) && columns % 8 == 0 && aligned_to(16),
          .stride = matrix.stride,
          .head_step = head_step};
}

bool takes_tensor_cores(const Product& product) {
  return is_16_bit(product.a.dtype) && product.a.dtype == product.b.dtype;
}

/// A gradient in f32 next to bf16: takes tensor cores in three bf16 parts. One head alone: layers
/// have no others.
bool takes_bf16_parts(const Product& product) {
  return product.a.dtype == DType::kF32 && product.b.dtype == DType::kBF16 && product.heads == 1;
}

/// f32 dy in scratch memory, one bf16 part at a time.
class Bf16Parts {
 public:
  Bf16Parts(Queue& queue, const ProjectionParams& params)
      : queue_(queue),
        stride_(ceil_div(params.out_features, 8) * 8),
        memory_(queue.scratch(), static_cast<std::size_t>(params.rows * stride_) * 2),
        params_{.from = static_cast<const float*>(params.y.data),
                .to = reinterpret_cast<__nv_bfloat16*>(memory_.data()),
                .rows = params.rows,
                .columns = params.out_features,
                .from_stride = params.y.stride,
                .to_stride = stride_} {}

  /// Calls multiply(product) with each part as operand a, the smallest first, which rounds least.
  template <class Multiply>
  void for_each(const Product& product, const Multiply& multiply) {
    Product of_part = product;
    of_part.a = operand_of({memory_.data(), DType::kBF16, stride_}, stride_, 0, product.a.along_k);
    for (int part = 2; part >= 0; --part) {
      params_.part = part;
      launch_bf16_part(queue_, params_);
      multiply(of_part);
    }
  }

 private:
  Queue& queue_;
  std::int64_t stride_;
  Workspace memory_;
  Bf16Part params_;
};

/// Splits of k for a weight gradient with few tiles: enough blocks for a large GPU, of at least 256
/// rows each. Sizes alone decide, so that results do not depend on the GPU. Partial sums then take
/// up to 264 tiles of 64x64: 8 MiB in f64.
void split_rows(Product& product) {
  constexpr std::int64_t kBlocks = 264;  // two for each SM of an H200
  constexpr std::int64_t kLeastRows = 256;
  constexpr std::int64_t kTile = 64;
  const std::int64_t wanted = kBlocks / std::max(num_tiles(product, kTile, kTile), std::int64_t{1});
  const std::int64_t most = ceil_div(product.k, kLeastRows);
  const std::int64_t splits = std::max(std::min(wanted, most), std::int64_t{1});
  product.split_depth = ceil_div(ceil_div(product.k, splits), kLeastRows) * kLeastRows;
  product.splits = ceil_div(product.k, product.split_depth);
}

}  // namespace

namespace {

Product product_of(const ProjectionParams& params) {
  return {.m = params.rows,
          .n = params.out_features,
          .k = params.in_features,
          .heads = params.steps.heads,
          .a = operand_of(params.x, params.in_features, params.steps.x, true),
          .b = operand_of(params.w, params.in_features, params.steps.w, true),
          .c = result_of(params.y, params.out_features, params.steps.y, false),
          .bias = params.b,
          .split_depth = params.in_features,
          .longest_sum = params.in_features};
}

/// Whether one launch can compute both.
bool go_together(const Product& one, const Product& other) {
  return one.m == other.m && one.k == other.k && one.a.dtype == other.a.dtype &&
         one.b.dtype == other.b.dtype;
}

/// Whether a kernel for few rows computes them. They also take more rows where tiles would leave
/// most SMs without work. The choice changes no bit.
bool is_decode(std::span<const Product> products) {
  constexpr std::int64_t kDecodeRows = 16;
  constexpr std::int64_t kFewTiles = 64;
  std::int64_t tiles = 0;
  for (const Product& product : products) tiles += num_tiles(product, 64, 64) * product.heads;
  return products.front().m <= kDecodeRows || tiles < kFewTiles;
}

/// By the kernel that is fastest for so many rows.
void launch_tensor_cores(Queue& queue, std::span<const Product> products) {
  if (hopper::multiply_rows(queue, products)) return;
  is_decode(products) ? launch_tensor_core_decode(queue, products)
                      : launch_tensor_core_forward(queue, products);
}

}  // namespace

void project(Queue& queue, std::span<const ProjectionParams> params) {
  std::vector<Product> products;
  for (const ProjectionParams& one : params) products.push_back(product_of(one));
  for (std::span<const Product> left(products); !left.empty();) {
    std::size_t count = 1;
    while (count < std::min(left.size(), kMostProducts) && go_together(left[0], left[count])) {
      ++count;
    }
    const std::span<const Product> together = left.first(count);
    if (takes_tensor_cores(left[0])) {
      launch_tensor_cores(queue, together);
    } else if (is_decode(together)) {
      launch_fma_decode(queue, together);
    } else {
      for (const Product& product : together) launch_fma(queue, product);
    }
    left = left.subspan(count);
  }
}

namespace {

/// dx += dy W, or dx = dy W.
Product input_gradient_of(const ProjectionParams& params, bool adds) {
  return {.m = params.rows,
          .n = params.in_features,
          .k = params.out_features,
          .heads = params.steps.heads,
          .a = operand_of(params.y, params.out_features, params.steps.y, true),
          .b = operand_of(params.w, params.in_features, params.steps.w, false),
          .c = result_of(params.dx, params.in_features, params.steps.x, adds),
          .split_depth = params.out_features,
          .longest_sum = params.out_features};
}

/// dx in f32 or f64.
void launch_input_gradient(Queue& queue, const ProjectionParams& params, bool adds) {
  Product product = input_gradient_of(params, adds);
  if (takes_tensor_cores(product)) return launch_tensor_core_input_gradient(queue, product);
  if (!takes_bf16_parts(product)) return launch_fma(queue, product);
  Bf16Parts(queue, params).for_each(product, [&](Product& part) {
    launch_tensor_core_input_gradient(queue, part);
    part.c.adds = true;
  });
}

}  // namespace

void project_input_gradient(Queue& queue, const ProjectionParams& params) {
  if (params.rows != 0) launch_input_gradient(queue, params, true);
}

/// A 16-bit dx is rounded by the last product, whose tiles add what the others have summed.
void project_input_gradients(Queue& queue, std::span<const ProjectionParams> params) {
  const ProjectionParams& last = params.back();
  if (last.rows == 0) return;
  const bool rounds = is_16_bit(last.dx.dtype);
  Product rounding = input_gradient_of(last, params.size() > 1);
  const bool rounds_last = rounds && takes_tensor_cores(rounding);
  std::optional<Workspace> memory;
  Matrix sums = last.dx;
  if (rounds && (params.size() > 1 || !rounds_last)) {
    const std::int64_t elements = last.rows * last.dx.stride;
    memory.emplace(queue.scratch(), static_cast<std::size_t>(elements) * sizeof(float));
    sums = {memory->data(), DType::kF32, last.dx.stride};
  }
  for (std::size_t i = 0; i < params.size(); ++i) {
    if (rounds_last && i + 1 == params.size()) break;
    ProjectionParams one = params[i];
    one.dx = sums;
    launch_input_gradient(queue, one, i > 0);
  }
  if (rounds_last) {
    if (memory) rounding.c.before = reinterpret_cast<const float*>(memory->data());
    launch_tensor_core_input_gradient(queue, rounding);
  } else if (rounds) {
    const Dims shape{last.rows, last.in_features};
    const Dims strides{last.dx.stride, 1};
    copy(queue, ConstTensorView(sums.data, sums.dtype, shape, strides),
         TensorView(last.dx.data, last.dx.dtype, shape, strides));
  }
}

namespace {

Product weight_gradient_of(const ProjectionParams& params) {
  Product product{.m = params.out_features,
                  .n = params.in_features,
                  .k = params.rows,
                  .a = operand_of(params.y, params.out_features, 0, false),
                  .b = operand_of(params.x, params.in_features, 0, false),
                  .c = result_of(params.dw, params.in_features, 0, true),
                  .longest_sum = kLongestSum};
  split_rows(product);
  return product;
}

/// Whether other launches may run at the same time.
bool is_plain(const Product& product) { return product.splits == 1 && takes_tensor_cores(product); }

/// By splits, where there are several, with results of their own.
void launch_weight_gradient(Queue& queue, const ProjectionParams& params, Product product) {
  const ProductResult dw = product.c;
  std::optional<Workspace> partials;
  if (product.splits > 1) {
    const std::int64_t elements = product.splits * product.m * product.n;
    partials.emplace(queue.scratch(), static_cast<std::size_t>(elements) * size_of(dw.dtype));
    product.c = result_of({partials->data(), dw.dtype, product.n}, product.n, 0, false);
    product.c.split_step = product.m * product.n;
    product.c.pairs = product.c.pairs && product.c.split_step % 2 == 0;
  }
  const auto add_products = [&](const Product& part) {
    if (takes_tensor_cores(part)) {
      launch_tensor_core_weight_gradients(queue, {&part, 1});
    } else {
      launch_fma(queue, part);
    }
    if (part.splits > 1) launch_add_partials(queue, part, dw);
  };
  if (takes_bf16_parts(product)) {
    Bf16Parts(queue, params).for_each(product, add_products);
  } else {
    add_products(product);
  }
}

}  // namespace

void project_weight_gradients(Queue& queue, std::span<const ProjectionParams> params) {
  std::vector<Product> together;  // in one launch
  for (const ProjectionParams& one : params) {
    if (one.rows == 0) continue;
    const Product product = weight_gradient_of(one);
    if (!is_plain(product)) {
      launch_weight_gradient(queue, one, product);
    } else {
      const bool fits =
          together.empty() || (together.size() < kMostProducts && together[0].k == product.k &&
                               together[0].a.dtype == product.a.dtype);
      if (!fits) {
        launch_tensor_core_weight_gradients(queue, together);
        together.clear();
      }
      together.push_back(product);
    }
  }
  if (!together.empty()) launch_tensor_core_weight_gradients(queue, together);
  for (const ProjectionParams& one : params) {
    if (one.rows != 0 && one.db.data != nullptr) launch_bias_gradient(queue, one);
  }
}

}  // namespace ladon::cuda
