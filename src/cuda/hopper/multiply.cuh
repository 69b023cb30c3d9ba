// Launches a product on Hopper.
#pragma once

#include <optional>

#include "cuda/hopper/product.cuh"
#include "cuda/hopper/tensor_map.h"

namespace ladon::cuda::hopper {

/// Rows of an operand as the copy engine takes them; nothing where it cannot.
inline std::optional<CUtensorMap> map_of(const Product& product,
                                         const projection::ProductOperand& operand,
                                         std::int64_t rows, int tile_rows) {
  const bool along_k = operand.along_k;
  return make_tensor_map({operand.data,
                          operand.dtype,
                          {along_k ? product.k : rows, along_k ? rows : product.k, product.heads},
                          {operand.stride, operand.head_step},
                          {kBoxColumns, along_k ? tile_rows : kProductDepth, 1}});
}

/// Enqueues the product and returns true where it is large enough, and the copy engine can take its
/// operands; else does nothing.
template <class Layout, class Epilogue>
bool multiply(Queue& queue, const Product& product) {
  constexpr std::int64_t kMost = std::int64_t{1} << 30;
  const std::int64_t tiles = num_tiles(product, ProductTile::kM, ProductTile::kN) * product.heads;
  const int processors = queue.num_multiprocessors();
  if (queue.kernels() != KernelSet::kHopper || product.splits != 1 || product.k == 0 ||
      product.k > kMost || product.m <= ProductTile::kM / 2 || 2 * tiles < processors ||
      tiles > kMost) {
    return false;
  }
  const std::optional<CUtensorMap> a = map_of(product, product.a, product.m, ProductTile::kM);
  const std::optional<CUtensorMap> b = map_of(product, product.b, product.n, ProductTile::kN);
  if (!a || !b) return false;
  constexpr std::size_t kAlignment = 1024;
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(processors, tiles));
  queue.launch(product.a.dtype == DType::kF16 ? multiply_wgmma<__half, Layout, Epilogue>
                                              : multiply_wgmma<__nv_bfloat16, Layout, Epilogue>,
               {dim3(blocks), dim3(kProductThreads), sizeof(ProductMemory) + kAlignment},
               HopperProductParams{*a, *b, product});
  return true;
}

}  // namespace ladon::cuda::hopper
