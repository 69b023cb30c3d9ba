// A checked call turned into plain AttentionParams.
#pragma once

#include <cstdint>
#include <string_view>

#include "attention/validate.h"
#include "core/attention_params.h"
#include "core/workspace.h"
#include "ladon/attention.h"
#include "ladon/kv_cache_view.h"

namespace ladon {

/// Owns the small arrays that the params point to; they live in a workspace of the Context, so that
/// a steady state allocates nothing.
class Problem {
 public:
  /// Checks q, k, v and options; v may be absent. Throws Error.
  Problem(const Context& context, std::string_view operation, const ConstTensorView& q,
          const ConstTensorView& k, const ConstTensorView& v, const AttentionOptions& options);

  /// Over a cache instead of k and v.
  Problem(const Context& context, std::string_view operation, const ConstTensorView& q,
          const KvCacheView& cache, const AttentionOptions& options);

  const AttentionSizes& sizes() const noexcept { return sizes_; }
  const AttentionParams& params() const noexcept { return params_; }

  // Further tensors; each must have been checked.
  void set_out(const ConstTensorView& out);
  void set_lse(const ConstTensorView& lse);
  void set_dout(const ConstTensorView& dout);
  void set_dlse(const ConstTensorView& dlse);
  void set_dq(const TensorView& dq);
  void set_dk(const TensorView& dk);
  void set_dv(const TensorView& dv);

 private:
  /// Sizes, rules and sequences; all but the tensors.
  void set_up(const AttentionOptions& options);
  /// Sets one operand, and where each sequence starts in it.
  void set_operand(const ConstTensorView& view, std::span<const std::int64_t> offsets,
                   Operand AttentionParams::*operand, std::int64_t Sequence::*start);
  void set_lse_operand(const ConstTensorView& view, LseOperand AttentionParams::*operand,
                       std::int64_t Sequence::*start);

  AttentionSizes sizes_;
  AttentionParams params_;
  Workspace arrays_;
  Sequence* sequences_;
  std::span<const std::int64_t> query_offsets_;
  std::span<const std::int64_t> kv_offsets_;
};

}  // namespace ladon
