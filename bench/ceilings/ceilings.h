// What each instruction set's translation unit gives: a loop of nothing but multiply-adds.
//
// Everything else in those units is unnamed, as in the kernels': an inline function that leaks out
// of them could be linked into code for older CPUs.
#pragma once

#include <cstdint>

namespace ladon::bench {

/// How many random numbers a loop wants: factors and terms of two steps, of 16 lanes.
inline constexpr int kCeilingSeeds = 2 * 2 * 16;

struct CeilingLoop {
  double flops;     // what was done
  double checksum;  // to be used, or the compiler may drop the work
};

/// Runs `steps` steps on the calling thread. The first half of the seeds are factors, below 1 in
/// magnitude; the rest are terms.
CeilingLoop fma_loop_baseline(bool is_f64, std::int64_t steps, const double* seeds);
CeilingLoop fma_loop_avx2(bool is_f64, std::int64_t steps, const double* seeds);
CeilingLoop fma_loop_avx512(bool is_f64, std::int64_t steps, const double* seeds);
CeilingLoop pair_loop_avx512_bf16(std::int64_t steps, const double* seeds);
CeilingLoop tile_loop_amx(std::int64_t steps, const double* seeds);

}  // namespace ladon::bench
