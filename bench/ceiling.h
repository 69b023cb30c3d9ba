// The machine's own limits, as pieces of work to be timed between the cases.
#pragma once

#include <cstdint>

#include "ladon/context.h"
#include "ladon/dtype.h"
#include "ladon/tensor.h"
#include "timing.h"

namespace ladon::bench {

/// What can bound a case.
enum class Limit : std::uint8_t {
  kFma,     // multiply-adds of vectors
  kAmx,     // products of tiles
  kMemory,  // reading
};

/// "FMA", "AMX" or "memory".
const char* name_of(Limit limit);

/// The limit that the context's kernels meet where `wanted` is the one that a target names. AMX
/// becomes FMA as long as no kernel uses it: an AMX ceiling (a loop of tile products over random
/// data, warmed for a second) joins here and in compute_ceiling().
Limit limit_here(const Context& context, Limit wanted);

/// The most flops of a limit that is not memory. `dtype` as below.
Work compute_ceiling(const Context& context, Limit limit, DType dtype);

/// Nothing but multiply-adds on all of the context's threads, with the context's instructions.
/// `dtype` is what is computed in: f64, or f32 for all others. The context must outlive the work.
Work fma_ceiling(const Context& context, DType dtype);

/// Memory that no cache holds.
class ReadBuffer {
 public:
  ReadBuffer();
  /// Reads all of it once on all of the context's threads; both must outlive the work. It also
  /// leaves nothing of other data in the caches.
  Work read_ceiling(const Context& context) const;

 private:
  Tensor memory_;
};

}  // namespace ladon::bench
