// Launches product_rows.cuh: which products it takes, and how many features a block has.

#include "cuda/hopper/multiply_rows.h"

#include <algorithm>
#include <limits>

#include "cuda/hopper/product_rows.cuh"
#include "cuda/hopper/tensor_map.h"

namespace ladon::cuda::hopper {
namespace {

// With fewer rows projection_decode.cu is a little faster, more have product.cuh.
constexpr std::int64_t kFewestRows = 9;
constexpr std::int64_t kMostRows = kGroupRows;
constexpr std::int64_t kAlignment = 1024;
constexpr std::int64_t kSharedBytes =
    227 * 1024 - kAlignment - std::int64_t{sizeof(BufferBarriers)} * kMostRowsStages;

std::int64_t stage_bytes(std::int64_t x_rows, std::int64_t boxes) {
  return kDepthBoxes * (x_rows * kBoxRowBytes + boxes * kBoxBytes);
}

/// Boxes of a tile: those with which a multiprocessor copies least.
int choose_boxes(std::int64_t x_rows, std::int64_t all_boxes, int processors) {
  int best = 0;
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  for (const int boxes : {4, 3, 2, 1}) {
    const std::int64_t rounds = ceil_div(ceil_div(all_boxes, boxes), processors);
    const std::int64_t bytes = rounds * stage_bytes(x_rows, boxes);
    if (bytes >= least) continue;
    best = boxes;
    least = bytes;
  }
  return best;
}

template <class Half, int kBoxes>
void launch_boxes(Queue& queue, const RowsProductParams& params) {
  const int blocks = std::min(params.tiles, queue.num_multiprocessors());
  queue.launch(multiply_rows<Half, kBoxes>,
               {.blocks = dim3(static_cast<unsigned>(blocks)),
                .threads = dim3(kRowsThreads),
                .shared_bytes = static_cast<std::size_t>(
                    kAlignment + params.stages * stage_bytes(params.x_rows, kBoxes)),
                .starts_early = true},
               params);
}

template <class Half>
void launch_rows(Queue& queue, int boxes, const RowsProductParams& params) {
  switch (boxes) {
    case 1: return launch_boxes<Half, 1>(queue, params);
    case 2: return launch_boxes<Half, 2>(queue, params);
    case 3: return launch_boxes<Half, 3>(queue, params);
    default: return launch_boxes<Half, 4>(queue, params);
  }
}

/// Rows of an operand, `box` of which one copy takes.
std::optional<CUtensorMap> rows_map(const projection::ProductOperand& operand, std::int64_t rows,
                                    std::int64_t k, int box) {
  return make_tensor_map(
      {operand.data, operand.dtype, {k, rows, 1}, {operand.stride, 0}, {kBoxColumns, box, 1}});
}

}  // namespace

bool multiply_rows(Queue& queue, std::span<const Product> products) {
  const Product& first = products.front();
  constexpr std::int64_t kMost = std::int64_t{1} << 24;  // features, and values of k
  if (!is_hopper(queue.kernels()) || first.k == 0 || first.k > kMost || first.m < kFewestRows ||
      first.m > kMostRows) {
    return false;
  }
  std::int64_t all_boxes = 0;
  for (const Product& product : products) {
    if (product.heads != 1 || product.n > kMost || product.a.data != first.a.data ||
        product.a.stride != first.a.stride) {
      return false;
    }
    all_boxes += ceil_div(product.n, kBoxFeatures);
  }
  if (all_boxes == 0) return false;
  RowsProductParams params;
  params.x_rows = static_cast<int>(ceil_div(first.m, 8)) * 8;
  const std::optional<CUtensorMap> x = rows_map(first.a, first.m, first.k, params.x_rows);
  if (!x) return false;
  params.x = *x;
  for (std::size_t i = 0; i < products.size(); ++i) {
    const Product& product = products[i];
    params.products[i] = product;
    params.boxes[i] = static_cast<int>(ceil_div(product.n, kBoxFeatures));
    if (params.boxes[i] == 0) continue;
    const std::optional<CUtensorMap> w = rows_map(product.b, product.n, product.k, kBoxFeatures);
    if (!w) return false;
    params.w[i] = *w;
  }
  const int boxes = choose_boxes(params.x_rows, all_boxes, queue.num_multiprocessors());
  params.tiles = static_cast<int>(ceil_div(all_boxes, boxes));
  params.stages = static_cast<int>(
      std::min<std::int64_t>(kMostRowsStages, kSharedBytes / stage_bytes(params.x_rows, boxes)));
  (first.a.dtype == DType::kF16 ? launch_rows<__half> : launch_rows<__nv_bfloat16>)(queue, boxes,
                                                                                    params);
  return true;
}

}  // namespace ladon::cuda::hopper
