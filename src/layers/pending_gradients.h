// Gradients of a layer's parameters while a backward pass sums them up.
#pragma once

#include <vector>

#include "ladon/attention_layer.h"

namespace ladon {

/// Gradients on their way into the parameters: added at the very end, so that a failure on the way
/// leaves the layer as it was.
class PendingGradients {
 public:
  PendingGradients(const Context& context, AttentionLayer& layer);

  /// The pending gradient of parameter number `index`; absent where that is kNoParameter.
  TensorView of(int index);

  void commit() noexcept;

 private:
  const Context& context_;
  AttentionLayer& layer_;
  std::vector<Tensor> pending_;
};

}  // namespace ladon
