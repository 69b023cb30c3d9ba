#include "ladon/tensor.h"

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "core/checks.h"
#include "core/context_impl.h"
#include "core/device_memory.h"
#include "core/element.h"
#include "core/fail.h"

namespace ladon {
namespace {

/// Bytes of a dense array, checked; 0 where a size is 0.
std::size_t dense_bytes(DType dtype, const Dims& shape) {
  constexpr std::int64_t kMax = std::numeric_limits<std::ptrdiff_t>::max();
  check_known("Tensor", "dtype", dtype);
  check_no_negative_size("Tensor", "shape", shape);
  auto bytes = static_cast<std::int64_t>(size_of(dtype));
  bool empty = false;
  for (const std::int64_t size : shape) {
    if (size == 0) {
      empty = true;
    } else if (bytes > kMax / size) {
      fail(ErrorCode::kOutOfMemory, "Tensor", "shape",
           "got " + shape.to_string() + " of " + name_of(dtype) +
               ", expected a size that fits the address space");
    } else {
      bytes *= size;
    }
  }
  return empty ? 0 : static_cast<std::size_t>(bytes);
}

std::size_t bytes_of(const Tensor& tensor) noexcept {
  return static_cast<std::size_t>(tensor.num_elements()) * size_of(tensor.dtype());
}

}  // namespace

Tensor Tensor::allocate(const std::shared_ptr<DeviceMemory>& memory, DType dtype,
                        const Dims& shape) {
  Tensor tensor;
  const std::size_t bytes = dense_bytes(dtype, shape);
  tensor.memory_ = memory;
  if (bytes != 0) {
    tensor.data_ = memory->allocate(bytes);
    if (tensor.data_ == nullptr) {
      fail(ErrorCode::kOutOfMemory, "Tensor", "shape",
           "got " + shape.to_string() + " of " + name_of(dtype) + ", which takes " +
               std::to_string(bytes) + " bytes, expected " + size_that_fits(*memory));
    }
  }
  tensor.dtype_ = dtype;
  tensor.shape_ = shape;
  return tensor;
}

Tensor Tensor::uninitialized(const Context& context, DType dtype, const Dims& shape) {
  return allocate(backend_of(context).memory(), dtype, shape);
}

Tensor Tensor::uninitialized(DType dtype, const Dims& shape) {
  return allocate(host_memory(), dtype, shape);
}

Tensor::Tensor(const Context& context, DType dtype, const Dims& shape)
    : Tensor(uninitialized(context, dtype, shape)) {
  memory_->zero(data_, bytes_of(*this));
}

Tensor::Tensor(DType dtype, const Dims& shape) : Tensor(uninitialized(dtype, shape)) {
  memory_->zero(data_, bytes_of(*this));
}

Tensor::~Tensor() {
  if (data_ != nullptr) memory_->free(data_, bytes_of(*this));
}

Tensor::Tensor(Tensor&& other) noexcept
    : memory_(std::move(other.memory_)),
      data_(std::exchange(other.data_, nullptr)),
      dtype_(std::exchange(other.dtype_, DType::kF32)),
      shape_(std::exchange(other.shape_, Dims())) {}

Tensor& Tensor::operator=(Tensor&& other) noexcept {
  // By way of a third, so that the old memory goes now and moving onto itself does no harm.
  Tensor taken(std::move(other));
  std::swap(memory_, taken.memory_);
  std::swap(data_, taken.data_);
  std::swap(dtype_, taken.dtype_);
  std::swap(shape_, taken.shape_);
  return *this;
}

Tensor Tensor::from_values(DType dtype, const Dims& shape, std::span<const double> values) {
  const std::size_t wanted = dense_bytes(dtype, shape) / size_of(dtype);
  if (values.size() != wanted) {
    fail("Tensor::from_values", "values",
         "got " + std::to_string(values.size()) + " values, expected " + std::to_string(wanted) +
             " for shape " + shape.to_string());
  }
  Tensor tensor = uninitialized(dtype, shape);
  for (std::size_t i = 0; i < values.size(); ++i) {
    store_element(tensor.data_, dtype, static_cast<std::int64_t>(i), values[i]);
  }
  return tensor;
}

Tensor Tensor::copy_of(const Context& context, const ConstTensorView& view) {
  return copy_of(context, view, view.dtype());
}

Tensor Tensor::copy_of(const Context& context, const ConstTensorView& view, DType dtype) {
  const Operation operation("Tensor::copy_of", context);
  check_present(operation, {"view", view});
  if (!view.device().is_cpu()) check_device(operation, {"view", view});
  Tensor tensor = view.device() == context.device() ? uninitialized(context, dtype, view.shape())
                                                    : uninitialized(dtype, view.shape());
  copy(context, view, tensor.view());
  return tensor;
}

Tensor Tensor::to(const Context& context) const {
  if (memory_ == nullptr) return {};
  const std::shared_ptr<DeviceMemory>& target = backend_of(context).memory();
  const std::size_t bytes = bytes_of(*this);
  Tensor result = allocate(target, dtype_, shape_);
  if (target->device() == device()) {
    target->copy(result.data_, data_, bytes);
  } else if (device().is_cpu()) {
    target->upload(result.data_, data_, bytes);
  } else if (target->device().is_cpu()) {
    memory_->download(result.data_, data_, bytes);
  } else {
    const Tensor staged = to_host();
    target->upload(result.data_, staged.data_, bytes);
  }
  return result;
}

Tensor Tensor::to_host() const {
  if (memory_ == nullptr) return {};
  Tensor result = allocate(host_memory(), dtype_, shape_);
  memory_->download(result.data_, data_, bytes_of(*this));
  return result;
}

Tensor Tensor::clone() const {
  if (memory_ == nullptr) return {};
  Tensor result = allocate(memory_, dtype_, shape_);
  memory_->copy(result.data_, data_, bytes_of(*this));
  return result;
}

DeviceId Tensor::device() const noexcept {
  return memory_ == nullptr ? DeviceId() : memory_->device();
}

TensorView Tensor::view() & { return {data_, dtype_, shape_, device()}; }
ConstTensorView Tensor::view() const& { return {data_, dtype_, shape_, device()}; }

std::int64_t Tensor::num_elements() const noexcept {
  if (data_ == nullptr) return 0;
  std::int64_t count = 1;
  for (const std::int64_t size : shape_) count *= size;
  return count;
}

}  // namespace ladon
