#include "ladon/context.h"

#include <utility>

#include "core/context_impl.h"

namespace ladon {

Context::Impl::Impl(const ContextOptions& options)
    : host_(options), backend_(make_backend(options, host_)) {}

Context::Context() : Context(ContextOptions{}) {}
Context::Context(const ContextOptions& options) : Context(std::make_unique<Impl>(options)) {}
Context::Context(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
Context::~Context() = default;
Context::Context(Context&&) noexcept = default;
Context& Context::operator=(Context&&) noexcept = default;

DeviceId Context::device() const noexcept { return impl_->backend().device(); }
int Context::num_threads() const noexcept { return impl_->workers().num_threads(); }
Isa Context::isa() const noexcept { return impl_->backend().isa(); }
void Context::synchronize() const { impl_->backend().synchronize(); }

}  // namespace ladon
