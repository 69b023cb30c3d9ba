// What a tile of a product becomes when its sums are complete: stored with a bias, or added to what
// was there. In the registers of tensor cores a thread has pairs of neighbouring columns.
#pragma once

#include <cstdint>

#include "cuda/kernels/projection_product.cuh"
#include "cuda/kernels/row_chunks.cuh"
#include "cuda/kernels/tensor_core.cuh"

namespace ladon::cuda::projection {

/// A thread's part of a tile.
template <class Shape>
struct Sums {
  float of[Shape::kTilesM][Shape::kTilesN][4];

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < Shape::kTilesM; ++i) {
#pragma unroll
      for (int j = 0; j < Shape::kTilesN; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) of[i][j][e] = 0;
      }
    }
  }
  __device__ void add(const Sums& other) {
#pragma unroll
    for (int i = 0; i < Shape::kTilesM; ++i) {
#pragma unroll
      for (int j = 0; j < Shape::kTilesN; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) of[i][j][e] += other.of[i][j][e];
      }
    }
  }
};

/// Writes two neighbouring elements of c, or the first where the second is past its end.
template <class Element>
struct alignas(2 * sizeof(Element)) ElementPair {
  Element first;
  Element second;
};
template <class Element>
__device__ inline void store_pair(Element* to, float first, float second, bool both, bool pairs) {
  if (both && pairs) {
    *reinterpret_cast<ElementPair<Element>*>(to) = {rounded<Element>(first),
                                                    rounded<Element>(second)};
    return;
  }
  to[0] = rounded<Element>(first);
  if (both) to[1] = rounded<Element>(second);
}
/// The row and column of c of a thread's first sum.
template <class Shape>
__device__ inline std::int64_t first_row_of(const BlockTile& tile) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  return std::int64_t{tile.m} * Shape::kM + warp / Shape::kWarpsN * Shape::kWarpM +
         static_cast<int>(threadIdx.x) % 32 / 4;
}
template <class Shape>
__device__ inline std::int64_t first_column_of(const BlockTile& tile) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  return std::int64_t{tile.n} * Shape::kN + warp % Shape::kWarpsN * Shape::kWarpN +
         static_cast<int>(threadIdx.x) % 4 * 2;
}

/// Whether no row or column of the tile is past the end of c.
template <class Shape>
__device__ inline bool is_whole(const Product& product, const BlockTile& tile) {
  return (std::int64_t{tile.m} + 1) * Shape::kM <= product.m &&
         (std::int64_t{tile.n} + 1) * Shape::kN <= product.n;
}

/// Calls use(offset, first, second, both) with each pair of a thread's sums that is inside c: the
/// element of c in which it starts, and whether the second is inside, too. Without branches where
/// the tile is whole, so that what they read is on its way together: read, added and written one
/// after the other, a tile of 128 x 192 took 19 us.
template <class Shape, class Use>
__device__ inline void for_each_pair(const Product& product, const BlockTile& tile,
                                     Sums<Shape>& sums, const Use& use) {
  const std::int64_t row = first_row_of<Shape>(tile);
  const std::int64_t column = first_column_of<Shape>(tile);
  const std::int64_t start = first_result(product.c, tile) + row * product.c.stride + column;
  const bool whole = is_whole<Shape>(product, tile);
#pragma unroll
  for (int r = 0; r < 2 * Shape::kTilesM; ++r) {
    const std::int64_t offset = start + 8 * r * product.c.stride;
    const auto use_pair = [&](int j, bool both) {
      float(&four)[4] = sums.of[r / 2][j];
      use(offset + 8 * j, four[r % 2 * 2], four[r % 2 * 2 + 1], both);
    };
    if (whole) {
#pragma unroll
      for (int j = 0; j < Shape::kTilesN; ++j) {
        use_pair(j, true);
      }
    } else if (row + 8 * r < product.m) {
      const std::int64_t columns = product.n - column;
#pragma unroll
      for (int j = 0; j < Shape::kTilesN; ++j) {
        if (8 * j < columns) use_pair(j, 8 * j + 1 < columns);
      }
    }
  }
}

template <class Shape>
__device__ inline void add_bias(Sums<Shape>& sums, const Product& product, const BlockTile& tile) {
  if (product.bias.data == nullptr) return;
  const std::int64_t first_column = first_column_of<Shape>(tile);
  with_storage_type(product.bias.dtype, [&](auto zero) {
    const auto* const bias = static_cast<const decltype(zero)*>(product.bias.data) + first_column;
    const std::int64_t columns = product.n - first_column;
#pragma unroll
    for (int j = 0; j < Shape::kTilesN; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float added = 8 * j + e < columns ? upconvert<float>(bias[8 * j + e]) : 0;
#pragma unroll
        for (int i = 0; i < Shape::kTilesM; ++i) {
          sums.of[i][j][e] += added;
          sums.of[i][j][2 + e] += added;
        }
      }
    }
  });
}

/// Adds the f32 elements of c, or what is to be added in place of them.
template <class Shape>
__device__ inline void add_before(Sums<Shape>& sums, const Product& product,
                                  const BlockTile& tile) {
  const ProductResult& c = product.c;
  const float* const data = c.before != nullptr ? c.before : static_cast<const float*>(c.data);
  const auto add = [&](auto pairs) {
    for_each_pair(product, tile, sums,
                  [&](std::int64_t offset, float& first, float& second, bool both) {
                    if (decltype(pairs)::value && both) {
                      const auto pair = *reinterpret_cast<const ElementPair<float>*>(data + offset);
                      first += pair.first;
                      second += pair.second;
                    } else {
                      first += data[offset];
                      if (both) second += data[offset + 1];
                    }
                  });
  };
  c.pairs ? add(std::true_type{}) : add(std::false_type{});
}

/// Rows of 16-bit elements by whole chunks, of which n must be a multiple. Pairs would fill half of
/// each 32 bytes that a store reaches. All lanes of a warp call it.
template <class Element, class Shape>
__device__ inline void store_chunks(const Sums<Shape>& sums, const Product& product,
                                    const BlockTile& tile) {
  static_assert(sizeof(Element) == 2);
  constexpr int kInFours = Shape::kTilesN / 4 * 4;
  const int lane = static_cast<int>(threadIdx.x) % 4;
  const std::int64_t row = first_row_of<Shape>(tile);
  const std::int64_t column = first_column_of<Shape>(tile) + lane * 6;  // of the lane's chunk
  auto* const to = static_cast<Element*>(product.c.data) + first_result(product.c, tile) +
                   row * product.c.stride + column;
  const std::int64_t columns = product.n - column;
#pragma unroll
  for (int r = 0; r < 2 * Shape::kTilesM; ++r) {
    const bool exists = row + 8 * r < product.m;
#pragma unroll
    for (int first = 0; first < kInFours; first += 4) {
      std::uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&four)[4] = sums.of[r / 2][first + i];
        words[i] = pack<Element>(four[r % 2 * 2], four[r % 2 * 2 + 1]);
      }
      gather_chunk(words);
      if (exists && 8 * first < columns) {
        store_chunk(to + 8 * r * product.c.stride + 8 * first, words);
      }
    }
#pragma unroll
    for (int j = kInFours; j < Shape::kTilesN; ++j) {
      const float(&four)[4] = sums.of[r / 2][j];
      if (exists && 8 * j < columns + 8 * lane) {
        *reinterpret_cast<std::uint32_t*>(to + 8 * r * product.c.stride + 8 * j - 6 * lane) =
            pack<Element>(four[r % 2 * 2], four[r % 2 * 2 + 1]);
      }
    }
  }
}

/// c = sums, in c's dtype.
template <class Shape>
__device__ inline void store_sums(Sums<Shape>& sums, const Product& product,
                                  const BlockTile& tile) {
  const ProductResult& c = product.c;
  with_storage_type(c.dtype, [&](auto zero) {
    using Element = decltype(zero);
    if constexpr (sizeof(Element) == 2) {
      if (c.chunks) return store_chunks<Element>(sums, product, tile);
    }
    auto* const data = static_cast<Element*>(c.data);
    for_each_pair(product, tile, sums,
                  [&](std::int64_t offset, float first, float second, bool both) {
                    store_pair(data + offset, first, second, both, c.pairs);
                  });
  });
}

/// c = sums + bias.
struct StoreSums {
  template <class Shape>
  __device__ static void write(const Product& product, const BlockTile& tile, Sums<Shape>& sums,
                               bool /*adds*/) {
    add_bias(sums, product, tile);
    store_sums(sums, product, tile);
  }
};

/// c += sums, or c = sums.
struct AddSums {
  template <class Shape>
  __device__ static void write(const Product& product, const BlockTile& tile, Sums<Shape>& sums,
                               bool adds) {
    if (adds) add_before(sums, product, tile);
    store_sums(sums, product, tile);
  }
};

}  // namespace ladon::cuda::projection
