// Gradients of a layer's parameters while a backward pass sums them up.
#pragma once

#include <string_view>
#include <vector>

#include "ladon/attention_layer.h"

namespace ladon {

/// Gradients on their way into the parameters: added at the very end, so that a failure on the way
/// leaves the layer as it was.
class PendingGradients {
 public:
  explicit PendingGradients(AttentionLayer& layer);

  /// The pending gradient of that name; absent where the layer has no such parameter.
  TensorView of(std::string_view name);

  void commit() noexcept;

 private:
  AttentionLayer& layer_;
  std::vector<Tensor> pending_;
};

}  // namespace ladon
