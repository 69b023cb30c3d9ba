// The products of bf16 forward tiles on AMX.
//
// K's rows and q's pairs are tiles as they lie. V's pairs, [key pair][value_dim], are what AMX
// wants of its second operand; here V comes first, so that sums stay [value_dim][row] as the vector
// kernels keep them, and its pairs are transposed 16 x 16 at a time: about 70 cycles for each, 16
// of them for 64 keys of 128, beside 64 products of 16 cycles for 64 rows. Not measured on a
// machine with AMX yet; tested on an emulated one.
#pragma once

#include <cstdint>

#include "cpu/kernels/pair_products.inl"
#include "cpu/kernels/tile_gemm.inl"

namespace ladon::cpu {
namespace {

class TileEngine {
 public:
  using Pair = std::uint32_t;
  static constexpr std::int64_t kUnit = kTileSide;

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

  static void score(const KeySpan& span, std::int64_t width, std::int64_t depth, const Pair* keys,
                    std::int64_t stride, const Pair* q, float* scores) {
    const std::int64_t ahead = span.begin + kKeyBlock;
    prefetch_kv(span, ahead, smaller(ahead + kKeyBlock, span.last_end));
    tile_gemm(round_up(span.count(), kUnit), width, depth, {keys, stride}, {q, width}, scores,
              width, false);
  }

  static void add_values(std::int64_t dim, std::int64_t width, std::int64_t pairs,
                         const Pair* values, const Pair* weights, Pair* room, float* out,
                         bool accumulate) {
    for (std::int64_t pair = 0; pair < pairs; pair += kUnit) {
      for (std::int64_t i = 0; i < dim; i += kUnit) {
        transpose_16x16(values + pair * dim + i, dim, room + i * pairs + pair, pairs);
      }
    }
    tile_gemm(dim, width, pairs, {room, pairs}, {weights, width}, out, width, accumulate);
  }

 private:
  bool begun_ = false;
};

}  // namespace
}  // namespace ladon::cpu
