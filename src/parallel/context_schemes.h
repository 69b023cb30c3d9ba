// What the schemes of context-parallel attention have in common. Each computes into memory of its
// own; context_parallel.cpp copies the results to the caller when all ranks have theirs.
#pragma once

#include <vector>

#include "ladon/context.h"
#include "ladon/tensor.h"
#include "parallel/collective_call.h"
#include "parallel/whole_attention.h"

namespace ladon {

/// A rank's inputs. `saved` and `wanted` are those of backward.
struct ContextCall {
  const Context& context;
  const WholeAttention& whole;
  const ConstTensorView& q;
  const ConstTensorView& k;
  const ConstTensorView& v;
  AttentionSaved saved{};
  AttentionGradients wanted{};
};

struct ContextResults {
  Tensor out;
  Tensor lse;  // where it was requested
};

/// Absent tensors are not wanted. dbias and dsinks are this rank's contribution, f32 or f64, in the
/// whole's shape.
struct ContextGradients {
  Tensor dq;
  Tensor dk;
  Tensor dv;
  Tensor dbias;
  Tensor dsinks;
};

void attend_gathered(const ContextCall& own, CollectiveCall& call, ContextResults& results);
void attend_gathered_backward(const ContextCall& own, CollectiveCall& call,
                              ContextGradients& gradients);

void attend_ring(const ContextCall& own, CollectiveCall& call, ContextResults& results);
void attend_ring_backward(const ContextCall& own, CollectiveCall& call,
                          ContextGradients& gradients);

void attend_exchanged(const ContextCall& own, CollectiveCall& call, ContextResults& results);
void attend_exchanged_backward(const ContextCall& own, CollectiveCall& call,
                               ContextGradients& gradients);

/// One scheme. Results and gradients have memory of the right shapes.
struct SchemeFunctions {
  void (*forward)(const ContextCall&, CollectiveCall&, ContextResults&) = nullptr;
  void (*backward)(const ContextCall&, CollectiveCall&, ContextGradients&) = nullptr;
};
SchemeFunctions functions_of(ContextScheme scheme);

/// A piece's own elements: of [batch, tokens, heads, dim], and of [batch, heads, tokens].
template <class View>
View rows_of(const View& view, const QueryPiece& piece, const Range& heads) {
  if (view.absent()) return {};
  return view.slice(0, piece.batch, piece.batch + 1)
      .slice(1, piece.local, piece.local + piece.length)
      .slice(2, heads.begin, heads.end);
}
template <class View>
View lse_of(const View& view, const QueryPiece& piece, const Range& heads) {
  if (view.absent()) return {};
  return view.slice(0, piece.batch, piece.batch + 1)
      .slice(1, heads.begin, heads.end)
      .slice(2, piece.local, piece.local + piece.length);
}

inline TensorView present(Tensor& tensor) {
  return tensor.rank() == 0 ? TensorView() : tensor.view();
}

/// How many of `heads` heads are to travel and be computed together: few, so that the messages of
/// most of them hide behind the computation of others, and the memory for them stays small; but
/// enough for messages whose latency does not count. `bytes` are those of all ranks for one head.
std::int64_t heads_at_once(const ContextCall& own, std::int64_t heads, std::int64_t bytes);
/// `count` in runs of `at_once`.
std::vector<Range> stages_of(std::int64_t count, std::int64_t at_once);

/// Partial results of a ring that are merged at a time. Three read and write a third less than
/// adding them one by one; more would need more memory.
inline constexpr std::int64_t kRingParts = 3;

/// to += from, both f32 or both f64; `from` is contiguous.
void add_to(const Context& context, const ConstTensorView& from, const TensorView& to);

/// The gradients of bias and sinks of one attend_backward(), to be added to the whole's.
class SideGradients {
 public:
  /// `options` are those of the call.
  SideGradients(const ContextCall& own, const AttentionOptions& options);

  void add_views(AttentionGradients& gradients);
  /// `piece`, `heads` and `first_key` are where the call's bias and sinks begin in the whole's.
  void add(const QueryPiece& piece, const Range& heads, ContextGradients& sums,
           std::int64_t first_key = 0);

 private:
  const ContextCall& own_;
  Tensor dbias_;
  Tensor dsinks_;
};

}  // namespace ladon
