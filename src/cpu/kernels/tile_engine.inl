// The products of bf16 forward tiles on AMX.
//
// K's rows and q's pairs are tiles as they lie. V's pairs, [key pair][value_dim], are what AMX
// wants of its second operand; here V comes first, so that sums stay [value_dim][row] as the vector
// kernels keep them, and its pairs are transposed 16 x 16 at a time, once for a strip: about 120
// cycles for each, 16 of them for 64 keys of 128, beside 256 products of 16 cycles for 256 rows.
// Not measured on a machine with AMX yet; tested on an emulated one.
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

  static PairMatrix columns(std::int64_t dim, std::int64_t depth, const Pair* a, Pair* room) {
    for (std::int64_t pair = 0; pair < depth; pair += kUnit) {
      transpose<F32>(dim, reinterpret_cast<const float*>(a + pair * dim), dim,
                     reinterpret_cast<float*>(room + pair), depth);
    }
    return {room, depth};
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
