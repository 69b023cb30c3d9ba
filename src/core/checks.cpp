#include "core/checks.h"

#include <array>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "core/device_memory.h"
#include "core/fail.h"
#include "core/overlap.h"

namespace ladon {
namespace {

/// Bytes from the lowest to the highest element must fit a signed 64-bit number.
bool extent_overflows(const ConstTensorView& view) {
  std::int64_t extent = 1;
  std::int64_t elements = 1;
  for (int dim = 0; dim < view.rank(); ++dim) {
    const std::int64_t size = view.size(dim);
    if (size == 0) return false;
    std::int64_t stride = view.stride(dim);
    if (stride == std::numeric_limits<std::int64_t>::min()) return true;
    stride = stride < 0 ? -stride : stride;
    std::int64_t span = 0;
    if (__builtin_mul_overflow(size - 1, stride, &span) ||
        __builtin_add_overflow(extent, span, &extent) ||
        __builtin_mul_overflow(elements, size, &elements)) {
      return true;
    }
  }
  const auto bytes = static_cast<std::int64_t>(size_of(view.dtype()));
  return __builtin_mul_overflow(extent, bytes, &extent) ||
         __builtin_mul_overflow(elements, bytes, &elements);
}

}  // namespace

std::string text_of(double value) {
  std::array<char, 32> buffer{};
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value).ptr;
  return std::string(buffer.data(), end);
}

std::string got_shape(const ConstTensorView& view) { return "got " + view.shape().to_string(); }

void check_finite(std::string_view operation, std::string_view argument, double value) {
  if (!std::isfinite(value)) {
    fail(operation, argument, "got " + text_of(value) + ", expected a finite number");
  }
}

void check_known(std::string_view operation, std::string_view argument, DType dtype) {
  if (size_of(dtype) != 0) return;
  fail(operation, argument,
       "got " + std::to_string(static_cast<int>(dtype)) + ", expected a DType");
}

void check_no_negative_size(std::string_view operation, std::string_view argument,
                            const Dims& shape) {
  for (const std::int64_t size : shape) {
    if (size < 0) {
      fail(operation, argument, "got " + shape.to_string() + ", expected no negative size");
    }
  }
}

void check_present(std::string_view operation, const NamedView& argument) {
  if (argument.view.absent()) fail(operation, argument.name, "got none, expected a tensor");
}

void check_device(const Operation& operation, const NamedView& argument) {
  const auto& [name, view] = argument;
  if (view.absent()) return;
  check_device(operation, name, view.device());
  if (view.num_elements() == 0) return;  // its pointer may be past an array's end
  const DeviceId owner = owner_of(view.data(), view.device());
  if (owner == view.device()) return;
  fail(operation, name,
       "got a view of " + view.device().to_string() + " with a pointer to memory of " +
           owner.to_string() + ", expected one to its own");
}

void check_device(const Operation& operation, std::string_view argument, DeviceId device) {
  if (device == operation.device) return;
  fail(operation, argument,
       "got memory of " + device.to_string() + ", expected memory of " +
           operation.device.to_string() + ", where the call runs");
}

void check_not_null(std::string_view operation, const NamedView& argument) {
  if (argument.view.data() == nullptr && argument.view.num_elements() != 0) {
    fail(operation, argument.name, "got a null pointer, expected data");
  }
}

void check_strided_view(const Operation& operation, const NamedView& argument, int rank) {
  const auto& [name, view] = argument;
  check_present(operation, argument);
  if (view.rank() != rank) {
    fail(operation, name, got_shape(view) + ", expected " + std::to_string(rank) + " dimensions");
  }
  check_device(operation, argument);
  if (extent_overflows(view)) {
    fail(operation, name,
         got_shape(view) + " with strides " + view.strides().to_string() +
             ", expected a size that fits 64 bits");
  }
  check_not_null(operation, argument);
  if (view.num_elements() != 0 &&
      reinterpret_cast<std::uintptr_t>(view.data()) % size_of(view.dtype()) != 0) {
    fail(operation, name,
         "got data that is not aligned, expected a multiple of " +
             std::to_string(size_of(view.dtype())) + " bytes");
  }
}

void check_view(const Operation& operation, const NamedView& argument, int rank) {
  check_strided_view(operation, argument, rank);
  const ConstTensorView& view = argument.view;
  if (view.size(rank - 1) > 1 && view.stride(rank - 1) != 1) {
    fail(operation, argument.name,
         "got a last stride of " + std::to_string(view.stride(rank - 1)) + ", expected 1");
  }
}

void check_float(std::string_view operation, const NamedView& argument) {
  if (!is_float(argument.view.dtype())) {
    fail(operation, argument.name,
         std::string("got dtype ") + name_of(argument.view.dtype()) +
             ", expected f64, f32, f16 or bf16");
  }
}

void check_dtype(std::string_view operation, const NamedView& argument, DType wanted) {
  if (argument.view.dtype() != wanted) {
    fail(operation, argument.name,
         std::string("got dtype ") + name_of(argument.view.dtype()) + ", expected " +
             name_of(wanted));
  }
}

void check_shape(std::string_view operation, const NamedView& argument, const Dims& wanted) {
  if (!(argument.view.shape() == wanted)) {
    fail(operation, argument.name, got_shape(argument.view) + ", expected " + wanted.to_string());
  }
}

void check_tensor(const Operation& operation, const NamedView& argument, DType dtype,
                  const Dims& shape) {
  check_view(operation, argument, shape.rank());
  check_dtype(operation, argument, dtype);
  check_shape(operation, argument, shape);
}

void check_strided_floats(const Operation& operation, const NamedView& argument,
                          const Dims& shape) {
  check_strided_view(operation, argument, shape.rank());
  check_float(operation, argument);
  check_shape(operation, argument, shape);
}

void check_no_self_overlap(std::string_view operation, const NamedView& output) {
  if (overlaps_itself(output.view)) {
    fail(operation, output.name,
         "got strides " + output.view.strides().to_string() +
             " that reach one element twice, expected an output without overlap");
  }
}

void check_apart(std::string_view operation, const NamedView& output, const NamedView& other) {
  if (overlaps(output.view, other.view)) {
    fail(operation, output.name,
         "got memory that overlaps " + std::string(other.name) + ", expected separate memory");
  }
}

void check_no_overlap(std::string_view operation, std::span<const NamedView> outputs,
                      std::span<const NamedView> inputs) {
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    check_no_self_overlap(operation, outputs[i]);
    for (const NamedView& input : inputs) check_apart(operation, outputs[i], input);
    for (const NamedView& later : outputs.subspan(i + 1)) check_apart(operation, outputs[i], later);
  }
}

}  // namespace ladon
