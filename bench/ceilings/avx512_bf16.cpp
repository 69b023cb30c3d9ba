// Nothing but products of bf16 pairs on independent registers, as fma_loop.inl does for FMA.
#include "cpu/simd/vec_avx512_bf16.h"

// The loop needs the vectors above.
#include "ceilings/fma_loop.inl"

namespace ladon::bench {
namespace {

/// Two seeds to a pair.
cpu::Bf16Pairs seeded_pairs(const double* seeds) {
  alignas(64) std::uint32_t pairs[cpu::Bf16Pairs::kLanes];
  cpu::store_pairs(pairs, seeded<cpu::F32>(seeds), seeded<cpu::F32>(seeds + cpu::F32::kLanes));
  return cpu::load<cpu::Bf16Pairs>(pairs);
}

}  // namespace

CeilingLoop pair_loop_avx512_bf16(std::int64_t steps, const double* seeds) {
  using Sums = cpu::F32OfPairs;
  const cpu::Bf16Pairs a = seeded_pairs(seeds);
  const cpu::Bf16Pairs b = seeded_pairs(seeds + kCeilingSeeds / 2);
  Sums chains[kChains];
  LADON_UNROLL_ALL
  for (int i = 0; i < kChains; ++i) chains[i] = cpu::broadcast<Sums>(static_cast<float>(i + 1));
  for (std::int64_t step = 0; step < steps; ++step) {
    LADON_UNROLL_ALL
    for (int i = 0; i < kChains; ++i) chains[i] = fma(a, b, chains[i]);
  }
  Sums total = cpu::zero<Sums>();
  LADON_UNROLL_ALL
  for (int i = 0; i < kChains; ++i) total = cpu::operator+(total, chains[i]);
  alignas(64) float lanes[Sums::kLanes];
  store(lanes, total);
  return {4.0 * Sums::kLanes * kChains * static_cast<double>(steps), static_cast<double>(lanes[0])};
}

}  // namespace ladon::bench
