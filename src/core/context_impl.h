// The inside of a Context.
#pragma once

#include <memory>

#include "core/backend.h"
#include "ladon/context.h"

namespace ladon {

class Context::Impl {
 public:
  explicit Impl(const ContextOptions& options);
  /// With a backend that `make` makes for the host's side: how tests bring their own.
  template <class Make>
  Impl(const ContextOptions& options, const Make& make) : host_(options), backend_(make(host_)) {}

  Backend& backend() noexcept { return *backend_; }
  const Workers& workers() const noexcept { return host_.workers; }
  /// For lists that describe a call.
  WorkspacePool& host_scratch() noexcept { return host_.scratch; }

 private:
  Host host_;
  std::unique_ptr<Backend> backend_;
};

inline Backend& backend_of(const Context& context) noexcept { return context.impl().backend(); }

}  // namespace ladon
