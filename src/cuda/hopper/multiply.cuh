// Launches a product on Hopper.
#pragma once

#include <algorithm>
#include <iterator>
#include <optional>
#include <span>
#include <type_traits>

#include "cuda/hopper/product.cuh"
#include "cuda/hopper/tensor_map.h"

namespace ladon::cuda::hopper {

/// Rows of an operand as the copy engine takes them; nothing where it cannot. A tile of them is
/// copied in `parts`.
inline std::optional<CUtensorMap> map_of(const Product& product,
                                         const projection::ProductOperand& operand,
                                         std::int64_t rows, int tile_rows, int parts) {
  const bool along_k = operand.along_k;
  return make_tensor_map({operand.data,
                          operand.dtype,
                          {along_k ? product.k : rows, along_k ? rows : product.k, product.heads},
                          {operand.stride, operand.head_step},
                          {kBoxColumns, (along_k ? tile_rows : kProductDepth) / parts, 1}});
}

/// The tiles of a launch, and the blocks of a cluster.
struct ProductTiles {
  int columns = 0;
  int cluster = 1;

  /// Of a cluster.
  std::int64_t count(const Product& product) const {
    return num_tiles(product, cluster * kProductRows, columns) * product.heads;
  }
  std::int64_t count(std::span<const Product> products) const {
    std::int64_t tiles = 0;
    for (const Product& product : products) tiles += count(product);
    return tiles;
  }
};

template <class Half, int kColumns, int kTiles, class Layout, class Epilogue>
void launch_product(Queue& queue, unsigned blocks, const HopperProductParams& params) {
  constexpr std::size_t kAlignment = 1024;
  queue.launch(multiply_wgmma<Half, kColumns, kTiles, Layout, Epilogue>,
               {dim3(blocks), dim3(kProductThreads), sizeof(ProductMemory<kColumns>) + kAlignment},
               params);
}

template <class Half, class Layout, class Epilogue>
void launch_product(Queue& queue, const ProductTiles& tiles, unsigned blocks,
                    const HopperProductParams& params) {
  const auto launch = [&](auto columns) {
    constexpr int kColumns = decltype(columns)::value;
    if constexpr (kColumns >= 128) {
      if (tiles.cluster == 2) {
        return launch_product<Half, kColumns, 2, Layout, Epilogue>(queue, blocks, params);
      }
    }
    if constexpr (kColumns <= 128) {
      launch_product<Half, kColumns, 1, Layout, Epilogue>(queue, blocks, params);
    }
  };
  switch (tiles.columns) {
    case 64: return launch(std::integral_constant<int, 64>{});
    case 96:
      if constexpr (Layout::kOfA && Layout::kOfB) return launch(std::integral_constant<int, 96>{});
      [[fallthrough]];
    case 128: return launch(std::integral_constant<int, 128>{});
    case 176: return launch(std::integral_constant<int, 176>{});
    default: return launch(std::integral_constant<int, 192>{});
  }
}

/// Those that take the shortest, by the cycles of a tile's step (product.cuh): each multiprocessor
/// has one at a time. Blocks one by one wait for L2.
inline ProductTiles fastest_tiles(std::span<const Product> products, int processors) {
  constexpr ProductTiles kChoices[] = {{192, 2}, {176, 2}, {128, 2}, {128, 1}};
  const auto cycles = [&](const ProductTiles& tiles) {
    const std::int64_t rounds = ceil_div(tiles.count(products), processors / tiles.cluster);
    return rounds * (64 + tiles.columns * 3 / 4) * (tiles.cluster == 1 ? 9 : 8);
  };
  return *std::min_element(
      std::begin(kChoices), std::end(kChoices),
      [&](const ProductTiles& a, const ProductTiles& b) { return cycles(a) < cycles(b); });
}

/// Enqueues the products and returns true where they are large enough, and the copy engine can take
/// their operands; else does nothing. They have one k and dtype.
template <class Layout, class Epilogue>
bool multiply(Queue& queue, std::span<const Product> products) {
  constexpr std::int64_t kMost = std::int64_t{1} << 30;
  constexpr ProductTiles kMiddle{128, 1};
  const Product& first = products.front();
  const std::int64_t most_tiles = kMiddle.count(products);
  const int processors = queue.num_multiprocessors();
  if (!is_hopper(queue.kernels()) || first.splits != 1 || first.k == 0 || first.k > kMost ||
      first.m <= kProductRows / 4 || 5 * most_tiles < processors || most_tiles > kMost) {
    return false;
  }
  ProductTiles tiles = fastest_tiles(products, processors);
  // Narrower tiles where every one then has a multiprocessor. With one row of tiles they lose (64
  // rows, 6144 x 4096: 36 us instead of 31), with two they win (256 rows, 4096 x 4096: 22 and 30).
  constexpr bool kIsAlongK = Layout::kOfA && Layout::kOfB;
  if (first.m > kProductRows) {
    for (const int fewer : {96, 64}) {
      const ProductTiles narrow{fewer, 1};
      if ((kIsAlongK || fewer != 96) && narrow.count(products) <= processors) tiles = narrow;
    }
  }
  HopperProductParams params;
  for (std::size_t i = 0; i < products.size(); ++i) {
    const Product& product = products[i];
    const std::optional<CUtensorMap> a = map_of(product, product.a, product.m, kProductRows, 1);
    const std::optional<CUtensorMap> b =
        map_of(product, product.b, product.n, tiles.columns, tiles.cluster);
    if (!a || !b) return false;
    params.operands[i] = {*a, *b};
    params.products[i] = product;
    params.tiles[i] = static_cast<unsigned>(tiles.count(product));
  }
  const std::int64_t clusters =
      std::min<std::int64_t>(processors / tiles.cluster, tiles.count(products));
  const auto blocks = static_cast<unsigned>(clusters * tiles.cluster);
  first.a.dtype == DType::kF16
      ? launch_product<__half, Layout, Epilogue>(queue, tiles, blocks, params)
      : launch_product<__nv_bfloat16, Layout, Epilogue>(queue, tiles, blocks, params);
  return true;
}

}  // namespace ladon::cuda::hopper
