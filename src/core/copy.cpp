// copy(): on one device, or between a device and the host.

#include <utility>

#include "core/checks.h"
#include "core/context_impl.h"
#include "core/device_memory.h"
#include "core/fail.h"
#include "core/host_copy.h"
#include "ladon/tensor.h"
#include "ladon/tensor_view.h"

namespace ladon {
namespace {

std::size_t bytes_of(const ConstTensorView& view) {
  return static_cast<std::size_t>(view.num_elements()) * size_of(view.dtype());
}

/// Converted and made contiguous on the host, then moved, then spread out on the device.
void copy_to_device(const Context& context, const ConstTensorView& from, const TensorView& to) {
  Backend& backend = backend_of(context);
  Tensor packed;
  ConstTensorView source = from;
  if (from.dtype() != to.dtype() || !from.is_contiguous()) {
    packed = Tensor::uninitialized(to.dtype(), from.shape());
    copy_on_host(&context.impl().workers(), from, packed);
    source = packed;
  }
  if (to.is_contiguous()) return backend.memory()->upload(to.data(), source.data(), bytes_of(to));
  Tensor staged = Tensor::uninitialized(context, to.dtype(), to.shape());
  backend.memory()->upload(staged.data(), source.data(), bytes_of(to));
  backend.copy(staged, to);
}

/// The reverse.
void copy_to_host(const Context& context, const ConstTensorView& from, const TensorView& to) {
  Backend& backend = backend_of(context);
  Tensor packed;
  ConstTensorView source = from;
  if (from.dtype() != to.dtype() || !from.is_contiguous()) {
    packed = Tensor::uninitialized(context, to.dtype(), from.shape());
    backend.copy(from, packed);
    source = packed;
  }
  if (to.is_contiguous()) return backend.memory()->download(to.data(), source.data(), bytes_of(to));
  Tensor staged = Tensor::uninitialized(to.dtype(), to.shape());
  backend.memory()->download(staged.data(), source.data(), bytes_of(to));
  copy_on_host(&context.impl().workers(), staged, to);
}

}  // namespace

void copy(const Context& context, const ConstTensorView& from, const TensorView& to) {
  const Operation operation("copy", context);
  const NamedView input{"from", from};
  const NamedView output{"to", to};
  check_shape(operation, output, from.shape());
  for (const NamedView& argument : {input, output}) {
    if (!argument.view.device().is_cpu()) check_device(operation, argument);
    check_not_null(operation, argument);
  }
  const bool from_host = from.device().is_cpu() && !operation.device.is_cpu();
  const bool to_host = to.device().is_cpu() && !operation.device.is_cpu();
  if (from_host == to_host) check_apart(operation, output, input);
  check_no_self_overlap(operation, output);
  if (from.num_elements() == 0) return;
  if (from_host && to_host) return copy_on_host(&context.impl().workers(), from, to);
  if (from_host) return copy_to_device(context, from, to);
  if (to_host) return copy_to_host(context, from, to);
  backend_of(context).copy(from, to);
}

}  // namespace ladon
