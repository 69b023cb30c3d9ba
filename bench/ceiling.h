// The machine's own limits, as pieces of work to be timed between the cases.
#pragma once

#include "ladon/context.h"
#include "ladon/dtype.h"
#include "ladon/tensor.h"
#include "timing.h"

namespace ladon::bench {

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
