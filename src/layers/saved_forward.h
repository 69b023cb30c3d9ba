// The base of what layers save for backward; each kind of layer derives its own.
#pragma once

#include <memory>

#include "ladon/attention_layer.h"

namespace ladon {

class SavedForward::Impl {
 public:
  explicit Impl(std::shared_ptr<const char> layer) : layer_(std::move(layer)) {}
  virtual ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  /// The identity of the layer that saved it. Held, so that no other layer can get that address.
  const std::shared_ptr<const char>& layer() const noexcept { return layer_; }

 private:
  std::shared_ptr<const char> layer_;
};

}  // namespace ladon
