// The matrix product on AMX tiles: C[m][n] (+)= sum over k of A[m][k] . B[k][n], in bf16 pairs.
//
// Blocks of 2 x 2 tiles of sums: each tile of A and of B that is loaded is used twice, one load per
// product. All sizes are whole tiles; the caller pads with zeros. The sum over k has one fixed
// order for each element of C. Cost of 32 x 32 sums over 16 pairs: 4 products of 16 cycles at the
// unit's rate, 4 loads of 8.
#pragma once

#include <cstdint>

#include "cpu/kernels/pairs.inl"
#include "cpu/simd/tiles_amx.h"

namespace ladon::cpu {
namespace {

/// Bytes from one row to the next.
template <class Matrix>
inline std::int64_t row_bytes(const Matrix& matrix) {
  return matrix.stride * static_cast<std::int64_t>(sizeof(*matrix.data));
}

/// kRows x kColumns tiles of sums, in tiles 0 to 3; A is loaded to 4 and 5, B to 6 and 7.
template <int kRows, int kColumns>
inline void tile_gemm_block(std::int64_t depth, PairMatrix a, PairMatrix b,
                            ProductTarget<float> c) {
  const std::int64_t a_bytes = row_bytes(a);
  const std::int64_t b_bytes = row_bytes(b);
  const std::int64_t c_bytes = row_bytes(c);
  float* const corner = c.data;
  float* const below = c.at(kTileSide, 0);
  if (c.accumulate) {
    read_tile<0>(corner, c_bytes);
    if constexpr (kColumns == 2) read_tile<1>(corner + kTileSide, c_bytes);
    if constexpr (kRows == 2) read_tile<2>(below, c_bytes);
    if constexpr (kRows == 2 && kColumns == 2) read_tile<3>(below + kTileSide, c_bytes);
  } else {
    clear_tile<0>();
    if constexpr (kColumns == 2) clear_tile<1>();
    if constexpr (kRows == 2) clear_tile<2>();
    if constexpr (kRows == 2 && kColumns == 2) clear_tile<3>();
  }
  for (std::int64_t k = 0; k < depth; k += kTileSide) {
    read_tile<4>(a.at(0, k), a_bytes);
    read_tile<6>(b.at(k, 0), b_bytes);
    multiply_tiles<0, 4, 6>();
    if constexpr (kColumns == 2) {
      read_tile<7>(b.at(k, kTileSide), b_bytes);
      multiply_tiles<1, 4, 7>();
    }
    if constexpr (kRows == 2) {
      read_tile<5>(a.at(kTileSide, k), a_bytes);
      multiply_tiles<2, 5, 6>();
    }
    if constexpr (kRows == 2 && kColumns == 2) multiply_tiles<3, 5, 7>();
  }
  write_tile<0>(corner, c_bytes);
  if constexpr (kColumns == 2) write_tile<1>(corner + kTileSide, c_bytes);
  if constexpr (kRows == 2) write_tile<2>(below, c_bytes);
  if constexpr (kRows == 2 && kColumns == 2) write_tile<3>(below + kTileSide, c_bytes);
}

template <int kRows>
inline void tile_gemm_rows(std::int64_t width, std::int64_t depth, PairMatrix a, PairMatrix b,
                           ProductTarget<float> c) {
  std::int64_t n = 0;
  for (; n + 2 * kTileSide <= width; n += 2 * kTileSide) {
    tile_gemm_block<kRows, 2>(depth, a, b.from(0, n), c.from(0, n));
  }
  if (n < width) tile_gemm_block<kRows, 1>(depth, a, b.from(0, n), c.from(0, n));
}

/// All sizes are whole tiles; size.depth counts pairs. Tiles must be configured.
inline void tile_gemm(ProductSize size, PairMatrix a, PairMatrix b, ProductTarget<float> c) {
  std::int64_t m = 0;
  for (; m + 2 * kTileSide <= size.rows; m += 2 * kTileSide) {
    tile_gemm_rows<2>(size.width, size.depth, a.from(m, 0), b, c.from(m, 0));
  }
  if (m < size.rows) tile_gemm_rows<1>(size.width, size.depth, a.from(m, 0), b, c.from(m, 0));
}

}  // namespace
}  // namespace ladon::cpu
