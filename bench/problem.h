// One case of the benchmark: its shape, its work, its data, and a check of its answer.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "ladon/attention.h"
#include "ladon/context.h"
#include "ladon/dtype.h"
#include "ladon/kv_cache.h"
#include "ladon/tensor.h"

namespace ladon::bench {

enum class Pass : std::uint8_t { kForward, kBackward };
/// What bounds the case: arithmetic, or reading K and V from memory.
enum class Bound : std::uint8_t { kCompute, kMemory };

/// Where K and V come from.
enum class Source : std::uint8_t {
  kTensors,
  kContiguous,    // a contiguous KvCache
  kPaged,         // a paged one, 16 tokens to a page
  kSharedPrefix,  // a paged one in which all but the last 64 tokens of each sequence are shared
};

struct Shape {
  Pass pass = Pass::kForward;
  Bound bound = Bound::kCompute;
  DType dtype = DType::kF32;
  Source source = Source::kTensors;
  DType storage = DType::kF32;  // of a cache
  std::int64_t batch = 1;
  std::int64_t query_len = 2048;
  std::int64_t kv_len = 2048;
  std::int64_t num_heads = 8;
  std::int64_t num_kv_heads = 8;
  std::int64_t head_dim = 128;
  bool causal = false;

  /// "f32 forward B1 H8 S2048 D128 full".
  std::string name() const;
  /// Useful flops: 4 * batch * heads * query_len * kv_len * head_dim forward and 2.5 times that
  /// backward, of which a causal case needs half.
  double flops() const;
  /// Bytes of K and V (with their scales), each counted once, however many sequences read it.
  double kv_bytes() const;
};

/// The tensors of one case, filled with random numbers.
class Problem {
 public:
  explicit Problem(const Shape& shape);

  void run(const Context& context);

  /// Runs the case and compares some rows of every result with Isa::kReference in f64. Empty when
  /// they agree, else what is wrong. Backward needs this first: it makes out and lse.
  std::string check(const Context& context);

 private:
  std::string check_forward(const Context& reference, std::int64_t row) const;
  std::string check_cached(const Context& reference) const;
  std::string check_dq(const Context& reference, std::int64_t row) const;
  std::string check_dkv(const Context& reference, bool last_keys) const;
  double tolerance() const;

  Shape shape_;
  AttentionOptions options_;
  Tensor q_, k_, v_, out_, lse_;
  Tensor dout_, dq_, dk_, dv_;    // backward only
  std::optional<KvCache> cache_;  // in place of k_ and v_
};

}  // namespace ladon::bench
