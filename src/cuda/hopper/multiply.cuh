// Launches a product on Hopper.
#pragma once

#include <optional>
#include <span>

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

template <class Half, int kColumns, class Layout, class Epilogue>
void launch_product(Queue& queue, unsigned blocks, const HopperProductParams& params) {
  constexpr std::size_t kAlignment = 1024;
  queue.launch(multiply_wgmma<Half, kColumns, Layout, Epilogue>,
               {dim3(blocks), dim3(kProductThreads), sizeof(ProductMemory<kColumns>) + kAlignment},
               params);
}

/// How long tiles of so many columns take, by the cycles of one's step (product.cuh): each
/// multiprocessor has one at a time.
inline std::int64_t product_cycles(std::int64_t tiles, int processors, int columns) {
  return ceil_div(tiles, processors) * (64 + columns * 3 / 4);
}

/// Enqueues the products and returns true where they are large enough, and the copy engine can take
/// their operands; else does nothing. They have one m, k and dtype.
template <class Layout, class Epilogue>
bool multiply(Queue& queue, std::span<const Product> products) {
  constexpr std::int64_t kMost = std::int64_t{1} << 30;
  const Product& first = products.front();
  const auto count_tiles = [&](int columns) {
    std::int64_t tiles = 0;
    for (const Product& product : products) {
      tiles += num_tiles(product, kProductRows, columns) * product.heads;
    }
    return tiles;
  };
  const std::int64_t narrow = count_tiles(128);
  const std::int64_t wide = count_tiles(192);
  const int processors = queue.num_multiprocessors();
  if (!is_hopper(queue.kernels()) || first.splits != 1 || first.k == 0 || first.k > kMost ||
      first.m <= kProductRows / 4 || 5 * narrow < processors || narrow > kMost) {
    return false;
  }
  int columns =
      product_cycles(wide, processors, 192) <= product_cycles(narrow, processors, 128) ? 192 : 128;
  // Narrower tiles where every one then has a multiprocessor. With one row of tiles they lose (64
  // rows, 6144 x 4096: 36 us instead of 31), with two they win (256 rows, 4096 x 4096: 22 and 30).
  constexpr bool kIsAlongK = Layout::kOfA && Layout::kOfB;
  if (first.m > kProductRows) {
    for (const int fewer : {96, 64}) {
      if ((kIsAlongK || fewer != 96) && count_tiles(fewer) <= processors) columns = fewer;
    }
  }
  HopperProductParams params;
  for (std::size_t i = 0; i < products.size(); ++i) {
    const Product& product = products[i];
    const std::optional<CUtensorMap> a = map_of(product, product.a, product.m, kProductRows);
    const std::optional<CUtensorMap> b = map_of(product, product.b, product.n, columns);
    if (!a || !b) return false;
    params.operands[i] = {*a, *b};
    params.products[i] = product;
    params.tiles[i] =
        static_cast<unsigned>(num_tiles(product, kProductRows, columns) * product.heads);
  }
  const auto blocks =
      static_cast<unsigned>(std::min<std::int64_t>(processors, count_tiles(columns)));
  const auto launch = [&](auto element) {
    using Half = decltype(element);
    switch (columns) {
      case 64: return launch_product<Half, 64, Layout, Epilogue>(queue, blocks, params);
      case 96:
        if constexpr (kIsAlongK) {
          return launch_product<Half, 96, Layout, Epilogue>(queue, blocks, params);
        }
        [[fallthrough]];
      case 128: return launch_product<Half, 128, Layout, Epilogue>(queue, blocks, params);
      default: return launch_product<Half, 192, Layout, Epilogue>(queue, blocks, params);
    }
  };
  first.a.dtype == DType::kF16 ? launch(__half{}) : launch(__nv_bfloat16{});
  return true;
}

}  // namespace ladon::cuda::hopper
