// AttentionWorkload: one call of attention() or of its backward, with its tensors.
#pragma once

#include <optional>

#include "ladon/attention.h"
#include "ladon/kv_cache.h"
#include "ladon/tensor.h"
#include "shape.h"
#include "workload.h"

namespace ladon::bench {

/// The tensors of one shape, filled with random numbers.
class AttentionWorkload final : public Workload {
 public:
  AttentionWorkload(const Context& context, const Shape& shape);

  /// Backward needs this first: it makes out and lse.
  std::string check(const Context& context) override;
  void run(const Context& context) override;
  double flops() const override { return shape_.flops(); }
  double bytes() const override { return shape_.kv_bytes(); }

 private:
  void make_rule(const Context& context);
  std::string check_forward(const Context& context, const Context& reference,
                            std::int64_t row) const;
  std::string check_cached(const Context& context, const Context& reference) const;
  std::string check_dq(const Context& reference, std::int64_t row) const;
  std::string check_dkv(const Context& reference, bool last_keys) const;
  double tolerance() const;

  Shape shape_;
  AttentionOptions options_;
  Tensor q_, k_, v_, out_, lse_;
  Tensor slopes_, mask_, bias_;   // of a rule
  Tensor dout_, dq_, dk_, dv_;    // backward only
  std::optional<KvCache> cache_;  // in place of k_ and v_
};

}  // namespace ladon::bench
