// Nothing but products of tiles on four independent tiles of sums. On zeros the unit's clock would
// be higher than on numbers.
#include <cstdint>

#include "ceilings/ceilings.h"
#include "cpu/simd/tiles_amx.h"

namespace ladon::bench {

CeilingLoop tile_loop_amx(std::int64_t steps, const double* seeds) {
  constexpr int kPairs = 16 * 16;
  alignas(64) std::uint32_t pairs[4][kPairs];
  for (int i = 0; i < 4 * kPairs; ++i) {
    // The upper halves of f32 seeds are bf16 numbers.
    std::uint32_t halves[2];
    for (int half = 0; half < 2; ++half) {
      const float seed = static_cast<float>(seeds[(7 * i + half) % kCeilingSeeds]);
      __builtin_memcpy(&halves[half], &seed, sizeof seed);
    }
    pairs[i / kPairs][i % kPairs] = (halves[0] >> 16U) | (halves[1] & 0xffff0000U);
  }
  cpu::configure_tiles();
  cpu::clear_tile<0>();
  cpu::clear_tile<1>();
  cpu::clear_tile<2>();
  cpu::clear_tile<3>();
  cpu::read_tile<4>(pairs[0], 64);
  cpu::read_tile<5>(pairs[1], 64);
  cpu::read_tile<6>(pairs[2], 64);
  cpu::read_tile<7>(pairs[3], 64);
  for (std::int64_t step = 0; step < steps; ++step) {
    cpu::multiply_tiles<0, 4, 6>();
    cpu::multiply_tiles<1, 4, 7>();
    cpu::multiply_tiles<2, 5, 6>();
    cpu::multiply_tiles<3, 5, 7>();
  }
  alignas(64) float sums[kPairs];
  cpu::write_tile<0>(sums, 64);
  cpu::release_tiles();
  constexpr double kFlopsPerProduct = 2.0 * 16 * 16 * 32;
  return {4 * kFlopsPerProduct * static_cast<double>(steps), static_cast<double>(sums[0])};
}

}  // namespace ladon::bench
