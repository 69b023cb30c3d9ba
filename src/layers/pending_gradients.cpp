#include "layers/pending_gradients.h"

#include <cstddef>
#include <cstdint>
#include <utility>

namespace ladon {

PendingGradients::PendingGradients(AttentionLayer& layer) : layer_(layer) {
  for (const Parameter& parameter : layer.named_parameters()) {
    const DType dtype = parameter.value.dtype();
    pending_.emplace_back(dtype == DType::kF64 ? dtype : DType::kF32, parameter.value.shape());
  }
}

TensorView PendingGradients::of(std::string_view name) {
  const auto parameters = layer_.named_parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].name == name) return pending_[i];
  }
  return {};
}

void PendingGradients::commit() noexcept {
  const auto parameters = layer_.named_parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    Tensor& gradient = parameters[i].gradient;
    if (gradient.view().absent()) {
      gradient = std::move(pending_[i]);
      continue;
    }
    for (std::int64_t n = 0; n < gradient.num_elements(); ++n) {
      if (gradient.dtype() == DType::kF64) {
        static_cast<double*>(gradient.data())[n] +=
            static_cast<const double*>(pending_[i].data())[n];
      } else {
        static_cast<float*>(gradient.data())[n] += static_cast<const float*>(pending_[i].data())[n];
      }
    }
  }
}

}  // namespace ladon
