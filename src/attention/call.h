// A checked call of attention(), turned into the plain params that backends take.
#pragma once

#include <cstdint>
#include <span>

#include "attention/validate.h"
#include "core/arena.h"
#include "core/attention_params.h"
#include "ladon/attention.h"
#include "ladon/kv_cache_view.h"

namespace ladon {

/// Owns the list of sequences that the params point to; it is in a workspace of the Context, so
/// that a steady state allocates nothing. Views and options must have been checked, and outlive it.
class AttentionCall {
 public:
  /// v may be absent.
  AttentionCall(const Context& context, const AttentionSizes& sizes, const ConstTensorView& q,
                const ConstTensorView& k, const ConstTensorView& v,
                const AttentionOptions& options);
  /// Over a cache instead of k and v.
  AttentionCall(const Context& context, const AttentionSizes& sizes, const ConstTensorView& q,
                const KvCacheView& cache, const AttentionOptions& options);

  const AttentionSizes& sizes() const noexcept { return sizes_; }
  const AttentionParams& params() const noexcept { return params_; }

  // Further tensors. Absent ones are left out.
  void set_out(const ConstTensorView& out);
  void set_lse(const ConstTensorView& lse);
  void set_saved(const AttentionSaved& saved);
  void set_gradients(const AttentionGradients& gradients);
  void set_whole(const WholeProblem& whole) { params_.whole = whole; }

 private:
  struct SequenceList {
    SequenceList(Arena& arena, std::int64_t count) : sequences(arena.take<Sequence>(count)) {}
    Sequence* sequences;
  };

  AttentionCall(const Context& context, const AttentionSizes& sizes,
                const AttentionOptions& options);

  /// Sets one operand, and where each sequence starts in it.
  void set_operand(const ConstTensorView& view, std::span<const std::int64_t> offsets,
                   Operand AttentionParams::*operand, std::int64_t Sequence::*start);
  void set_lse_operand(const ConstTensorView& view, LseOperand AttentionParams::*operand,
                       std::int64_t Sequence::*start);

  AttentionSizes sizes_;
  AttentionParams params_;
  InWorkspace<SequenceList> list_;
  std::span<const std::int64_t> query_offsets_;
  std::span<const std::int64_t> kv_offsets_;
};

}  // namespace ladon
