#include "layers/pending_gradients.h"

#include <cstddef>
#include <utility>

#include "core/compute_dtype.h"
#include "core/context_impl.h"
#include "layers/layer_weights.h"

namespace ladon {
namespace {

FloatArray array_of(Tensor& tensor) {
  return {tensor.data(), tensor.dtype(), tensor.num_elements()};
}

}  // namespace

PendingGradients::PendingGradients(const Context& context, AttentionLayer& layer)
    : context_(context), layer_(layer) {
  for (const Parameter& parameter : layer.named_parameters()) {
    const DType dtype = parameter.value.dtype();
    pending_.emplace_back(context, compute_dtype(dtype), parameter.value.shape());
  }
}

TensorView PendingGradients::of(int index) {
  return index == kNoParameter ? TensorView() : pending_[static_cast<std::size_t>(index)].view();
}

void PendingGradients::commit() noexcept {
  const auto parameters = layer_.named_parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    Tensor& gradient = parameters[i].gradient;
    if (gradient.view().absent()) {
      gradient = std::move(pending_[i]);
    } else {
      backend_of(context_).accumulate({array_of(pending_[i]), array_of(gradient)});
    }
  }
}

}  // namespace ladon
