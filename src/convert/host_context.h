// A Context of the host, where conversions compute.
#pragma once

#include <optional>

#include "core/context_impl.h"
#include "ladon/context.h"

namespace ladon::convert {

/// The caller's where it is one, so that its threads are used.
class HostContext {
 public:
  explicit HostContext(const Context& context) : given_(context) {
    if (context.device().is_cpu()) return;
    ContextOptions options;
    options.check_interrupt = context.impl().workers().check_interrupt();
    own_.emplace(options);
  }
  operator const Context&() const noexcept { return own_ ? *own_ : given_; }

 private:
  const Context& given_;
  std::optional<Context> own_;
};

}  // namespace ladon::convert
