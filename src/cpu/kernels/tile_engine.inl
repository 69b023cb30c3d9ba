// The products of bf16 forward tiles on AMX.
//
// K's rows and q's pairs are loaded as tiles in place. V's pairs, [key pair][value_dim], have the
// layout that AMX takes for its second operand. Here V is the first operand, so that sums stay
// [value_dim][row] as in the vector kernels, and its pairs are transposed 16 x 16 at a time, once
// per strip: about 120 cycles each, 16 of them for 64 keys of 128, compared with 256 products of 16
// cycles for 256 rows. Not measured on a machine with AMX yet; tested on an emulated one.
#pragma once

#include <cstdint>

#include "cpu/kernels/pair_table.inl"
#include "cpu/kernels/tile_gemm.inl"

namespace ladon::cpu {
namespace {

class TileEngine {
 public:
  static constexpr std::int64_t kUnit = kTileSide;
  static constexpr std::int64_t kRowsAtOnce = 2 * kTileSide;

  TileEngine() = default;
  ~TileEngine() {
    if (begun_) release_tiles();
  }
  TileEngine(const TileEngine&) = delete;
  TileEngine& operator=(const TileEngine&) = delete;

  void begin() {
    configure_tiles();
    begun_ = true;
  }

  static void multiply(ProductSize size, PairMatrix a, PairMatrix b, ProductTarget<float> c) {
    tile_gemm(size, a, b, c);
  }

  static PairMatrix columns(std::int64_t dim, std::int64_t depth, const Pair* a, Pair* scratch) {
    for (std::int64_t pair = 0; pair < depth; pair += kUnit) {
      transpose<F32>(dim, reinterpret_cast<const float*>(a + pair * dim), dim,
                     reinterpret_cast<float*>(scratch + pair), depth);
    }
    return {scratch, depth};
  }

  static void multiply_columns(std::int64_t first, ProductSize size, PairMatrix a, PairMatrix b,
                               ProductTarget<float> c) {
    tile_gemm(size, a.from(first, 0), b, c);
  }

 private:
  bool begun_ = false;
};

}  // namespace
}  // namespace ladon::cpu
