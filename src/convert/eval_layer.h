// A layer without dropout: itself, or a copy where dropout would act.
#pragma once

#include <memory>

#include "ladon/latent_attention.h"
#include "ladon/multi_head_attention.h"

namespace ladon::convert {

class EvalLayer {
 public:
  explicit EvalLayer(const AttentionLayer& layer) : layer_(&layer) {
    if (!layer.is_training()) return;
    if (const auto* const latent = dynamic_cast<const LatentAttention*>(&layer)) {
      if (latent->options().dropout > 0) copy_ = std::make_unique<LatentAttention>(*latent);
    } else if (const auto* const heads = dynamic_cast<const MultiHeadAttention*>(&layer)) {
      if (heads->options().dropout > 0) copy_ = std::make_unique<MultiHeadAttention>(*heads);
    }
    if (copy_ == nullptr) return;
    copy_->eval();
    layer_ = copy_.get();
  }

  const AttentionLayer& operator*() const noexcept { return *layer_; }
  const AttentionLayer* operator->() const noexcept { return layer_; }

 private:
  const AttentionLayer* layer_;
  std::unique_ptr<AttentionLayer> copy_;
};

}  // namespace ladon::convert
