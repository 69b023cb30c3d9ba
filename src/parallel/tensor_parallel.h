// What the calls of TensorParallelAttention have in common.
#pragma once

#include "ladon/tensor_parallel.h"
#include "layers/cached_tokens.h"
#include "layers/layer_output.h"
#include "layers/multi_head.h"
#include "layers/pending_gradients.h"
#include "parallel/collective_call.h"
#include "parallel/share.h"

namespace ladon {

/// The columns of all ranks side by side, [rows, width]: `own` are this rank's share of them.
Tensor gather_columns(const Context& context, CollectiveCall& call, const ConstTensorView& own,
                      std::int64_t width);

/// This rank's share of the columns of the sum over ranks of `terms`, [rows, width], in the dtype
/// of sums.
Tensor reduce_columns(const Context& context, CollectiveCall& call, const ConstTensorView& terms);

/// Replaces a tensor of f32 or f64 by its sum over ranks [first, end), of which this is one, in
/// their order.
void sum_over_ranks(const Context& context, CollectiveCall& call, const TensorView& terms,
                    int first, int end);

/// A whole parameter, or a tensor that is cut in the same way, from the slices of all ranks. On the
/// host: of every rank, or of one, and then empty on the others.
inline constexpr int kEveryRank = -1;
Tensor gather_rows(const Context& context, CollectiveCall& call, const TensorParallelLayer& layer,
                   std::string_view name, const Tensor& own, int receiver = kEveryRank);

/// Sums the gradients of parameters that several ranks have.
void sum_shared_gradients(const Context& context, CollectiveCall& call,
                          const TensorParallelLayer& layer, PendingGradients& pending);

/// What ranks must have in common, in a signature.
void describe_rope(CallSignature& signature, const RopeOptions& rope, std::int64_t head_dim);
void describe_call(CallSignature& signature, const LayerCall& call, bool layer_is_causal);
void describe_call(CallSignature& signature, const ConstTensorView& x, const CachedTokens& tokens,
                   const CachedCall& call, bool layer_is_causal);

/// A LayerCall or CachedCall for some heads: their part of mask and bias.
template <class Call>
Call of_heads(Call call, const Range& heads) {
  call.mask = slice_unless_one(call.mask, 1, heads);
  call.bias = slice_unless_one(call.bias, 1, heads);
  return call;
}

/// Throws where a call wants the weights of attention.
void check_no_weights(const Operation& operation, const LayerCall& call);

/// All outputs, [rows, embed_dim], from the attended values of all heads; `out` is the output
/// projection, of which this rank has some rows.
Tensor project_out(const Context& context, CollectiveCall& call, const TensorParallelLayer& layer,
                   const LinearIndex& out, const ConstTensorView& all_attended);

/// Rows, [rows, width], as a tensor of the shape of the call's output.
Tensor with_shape(const Context& context, const Tensor& rows, const Dims& shape);

/// A backward call of project_out().
struct OutputGradient {
  const LinearIndex& out;
  const Tensor& all_attended;
  const ConstTensorView& grad_out;
  const Dims& own_shape;  // of this rank's own attended values
};

/// The gradient of this rank's own attended values, in the layer's dtype. Adds to the gradients of
/// the output projection.
Tensor project_out_backward(const Context& context, CollectiveCall& call,
                            const TensorParallelLayer& layer, const OutputGradient& of,
                            PendingGradients& pending);

/// What forward_training() of a rank leaves for backward, besides what a whole layer would.
template <class Saved>
class TensorParallelSaved final : public Saved {
 public:
  using Saved::Saved;
  Tensor all_attended;  // of all heads: [rows, num_heads * value_dim]
};

}  // namespace ladon
