// What the calls of TensorParallelAttention have in common.
#pragma once

#include "ladon/tensor_parallel.h"
#include "layers/multi_head.h"
#include "parallel/collective_call.h"

namespace ladon {

/// Elements [begin, end) of `count` that a rank owns.
struct Share {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t length() const { return end - begin; }
};
inline Share share_of(std::int64_t count, int rank, int ranks) {
  return {count * rank / ranks, count * (rank + 1) / ranks};
}

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

/// mask and bias with this rank's heads alone.
ConstTensorView slice_heads(const ConstTensorView& view, const Share& heads);

/// The whole layer, in a signature.
void describe_layer(const Context& context, const TensorParallelAttention& layer,
                    CallSignature& signature);

/// What forward_training() of a rank leaves for backward.
class TensorParallelSaved final : public multi_head::Saved {
 public:
  using Saved::Saved;
  Tensor all_attended;  // of all heads: [rows, num_heads * head_dim]
};

}  // namespace ladon
