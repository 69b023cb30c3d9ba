// A Context of the host, where conversions compute.
#pragma once

#include <optional>

#include "ladon/context.h"

namespace ladon::convert {

/// The caller's where it is one, so that its threads are used.
class HostContext {
 public:
  explicit HostContext(const Context& context) : given_(context) {
    if (!context.device().is_cpu()) own_.emplace();
  }
  operator const Context&() const noexcept { return own_ ? *own_ : given_; }

 private:
  const Context& given_;
  std::optional<Context> own_;
};

}  // namespace ladon::convert
