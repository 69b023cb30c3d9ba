#include "cpu/simd/vec_baseline.h"

// The loop needs the vectors above.
#include "ceilings/fma_loop.inl"

namespace ladon::bench {

CeilingLoop fma_loop_baseline(bool is_f64, std::int64_t steps, const double* seeds) {
  return run_fma_loop_of(is_f64, steps, seeds);
}

}  // namespace ladon::bench
