#include "ladon/tensor.h"

#include <cstddef>
#include <cstring>
#include <limits>
#include <new>
#include <string>
#include <utility>

#include "core/checks.h"
#include "core/element.h"
#include "core/fail.h"
#include "core/huge_pages.h"

namespace ladon {
namespace {

// One cache line, and one AVX-512 register.
constexpr std::align_val_t kAlignment{64};

/// Bytes of a dense array, or an Error that says what is wrong with the shape.
std::size_t dense_bytes(DType dtype, const Dims& shape) {
  constexpr std::int64_t kMax = std::numeric_limits<std::ptrdiff_t>::max();
  // Sizes of 0 count as 1 here, as they do in row_major_strides(): what passes has sound strides.
  auto bytes = static_cast<std::int64_t>(size_of(dtype));
  bool empty = false;
  check_no_negative_size("Tensor", "shape", shape);
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

}  // namespace

Tensor Tensor::uninitialized(DType dtype, const Dims& shape) {
  Tensor tensor;
  const std::size_t bytes = dense_bytes(dtype, shape);
  if (bytes != 0) {
    tensor.data_ = ::operator new(bytes, kAlignment, std::nothrow);
    if (tensor.data_ == nullptr) {
      fail(ErrorCode::kOutOfMemory, "Tensor", "shape",
           "got " + shape.to_string() + " of " + name_of(dtype) + ", which takes " +
               std::to_string(bytes) + " bytes, expected a size that fits the memory");
    }
    prefer_huge_pages(tensor.data_, bytes);
  }
  tensor.dtype_ = dtype;
  tensor.shape_ = shape;
  return tensor;
}

Tensor::Tensor(DType dtype, const Dims& shape) : Tensor(uninitialized(dtype, shape)) {
  if (data_ != nullptr) {
    std::memset(data_, 0, static_cast<std::size_t>(num_elements()) * size_of(dtype));
  }
}

Tensor::~Tensor() {
  if (data_ != nullptr) ::operator delete(data_, kAlignment);
}

Tensor::Tensor(Tensor&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      dtype_(std::exchange(other.dtype_, DType::kF32)),
      shape_(std::exchange(other.shape_, Dims())) {}

Tensor& Tensor::operator=(Tensor&& other) noexcept {
  // By way of a third, so that the old memory goes now and moving onto itself does no harm.
  Tensor taken(std::move(other));
  std::swap(data_, taken.data_);
  std::swap(dtype_, taken.dtype_);
  std::swap(shape_, taken.shape_);
  return *this;
}

Tensor Tensor::from_values(DType dtype, const Dims& shape, std::span<const double> values) {
  const std::size_t wanted = dense_bytes(dtype, shape) / size_of(dtype);
  if (values.size() != wanted) {
    fail("Tensor::from_values", "values",
         "got " + std::to_string(values.size()) + " numbers, expected " + std::to_string(wanted) +
             " for shape " + shape.to_string());
  }
  Tensor tensor = uninitialized(dtype, shape);
  for (std::size_t i = 0; i < values.size(); ++i) {
    store_element(tensor.data_, dtype, static_cast<std::int64_t>(i), values[i]);
  }
  return tensor;
}

Tensor Tensor::copy_of(const ConstTensorView& view) { return copy_of(view, view.dtype()); }

Tensor Tensor::copy_of(const ConstTensorView& view, DType dtype) {
  check_present("Tensor::copy_of", {"view", view});
  Tensor tensor = uninitialized(dtype, view.shape());
  copy(view, tensor.view());
  return tensor;
}

TensorView Tensor::view() & { return {data_, dtype_, shape_}; }
ConstTensorView Tensor::view() const& { return {data_, dtype_, shape_}; }

std::int64_t Tensor::num_elements() const noexcept {
  if (data_ == nullptr) return 0;
  std::int64_t count = 1;
  for (const std::int64_t size : shape_) count *= size;
  return count;
}

}  // namespace ladon
