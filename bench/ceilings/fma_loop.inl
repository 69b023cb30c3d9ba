// The loop behind every ceiling: x = x * factor + term on independent registers.
//
// 12 chains cover two FMAs a cycle of 4 cycles, and two multiplies and two adds a cycle of 3 + 3.
// Two factors and two terms alternate, so x settles into two values that differ in every bit: the
// units switch as they do on real numbers, which decides the clock. With the 12 chains they fill
// the 16 registers of the older sets. |factor| < 1 keeps x bounded; no term is near 0.
#pragma once

#include <cstdint>

#include "ceilings/ceilings.h"
#include "cpu/kernels/math.inl"

#if defined(__clang__)
#define LADON_UNROLL_ALL _Pragma("clang loop unroll(full)")
#else
#define LADON_UNROLL_ALL _Pragma("GCC unroll 16")
#endif

namespace ladon::bench {
namespace {

constexpr int kChains = 12;
constexpr int kHalves = 2;

template <class V>
V seeded(const double* seeds) {
  alignas(64) typename V::Scalar lanes[V::kLanes];
  for (int i = 0; i < V::kLanes; ++i) lanes[i] = static_cast<typename V::Scalar>(seeds[i]);
  return cpu::load<V>(lanes);
}

template <class V>
CeilingLoop run_fma_loop(std::int64_t steps, const double* seeds) {
  static_assert(V::kLanes * kHalves * 2 <= kCeilingSeeds);
  const double* terms = seeds + kCeilingSeeds / 2;
  const V factor[kHalves] = {seeded<V>(seeds), seeded<V>(seeds + V::kLanes)};
  const V term[kHalves] = {seeded<V>(terms), seeded<V>(terms + V::kLanes)};
  V chains[kChains];
  LADON_UNROLL_ALL
  for (int i = 0; i < kChains; ++i) {
    chains[i] = cpu::broadcast<V>(static_cast<typename V::Scalar>(i + 1));
  }
  for (std::int64_t step = 0; step < steps; ++step) {
    LADON_UNROLL_ALL
    for (int half = 0; half < kHalves; ++half) {
      LADON_UNROLL_ALL
      for (int i = 0; i < kChains; ++i) chains[i] = fma(chains[i], factor[half], term[half]);
    }
  }
  V total = cpu::zero<V>();
  LADON_UNROLL_ALL
  for (int i = 0; i < kChains; ++i) total = cpu::operator+(total, chains[i]);
  // By hand: GCC 12 warns about its own horizontal sums.
  alignas(64) typename V::Scalar lanes[V::kLanes];
  store(lanes, total);
  double checksum = 0;
  for (const typename V::Scalar lane : lanes) checksum += static_cast<double>(lane);
  return {2.0 * V::kLanes * kChains * kHalves * static_cast<double>(steps), checksum};
}

inline CeilingLoop run_fma_loop_of(bool is_f64, std::int64_t steps, const double* seeds) {
  return is_f64 ? run_fma_loop<cpu::F64>(steps, seeds) : run_fma_loop<cpu::F32>(steps, seeds);
}

}  // namespace
}  // namespace ladon::bench
