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
  kFma,      // multiply-adds of vectors
  kBf16,     // products of bf16 pairs in vectors
  kAmx,      // products of tiles
  kProduct,  // a large product of matrices on a GPU, by Ladon's own projection
  kMemory,   // reading; on a GPU copying, bytes read and written
  kRead,     // reading on a GPU; elsewhere that is kMemory
};

/// "FMA", "BF16", "AMX", "product", "memory" or "read".
const char* name_of(Limit limit);

/// Whether bytes are counted, and not flops.
constexpr bool counts_bytes(Limit limit) {
  return limit == Limit::kMemory || limit == Limit::kRead;
}

/// The limit that the context's kernels meet where `wanted` is the one that a target names: on a
/// GPU a product or its memory, without AMX products of bf16 pairs where the kernels have them,
/// else FMA.
Limit limit_here(const Context& context, Limit wanted);

/// The most flops of a limit that is not memory, on all of the context's threads and with its
/// instructions; a product is one of two square matrices of `dtype`, which is not a bound that the
/// hardware sets, but what the rest of a model gets. `dtype` is what FMA computes in: f64, or f32
/// for all others. The context must outlive the work.
Work compute_ceiling(const Context& context, Limit limit, DType dtype);

/// Memory that no cache holds, where the Context is.
class ReadBuffer {
 public:
  explicit ReadBuffer(const Context& context);
  /// Reads all of it once on all of the context's threads, or on a GPU by a kernel; both must
  /// outlive the work. It also leaves nothing of other data in the caches.
  Work read_ceiling(const Context& context) const;
  /// kMemory: on a GPU copies it, else reads it.
  Work memory_ceiling(const Context& context) const;

 private:
  mutable Tensor memory_;
  mutable Tensor copy_;  // on a GPU
};

}  // namespace ladon::bench
