// Tensor: owns a contiguous row-major array on some device, and gives views of it.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>

#include "ladon/dtype.h"
#include "ladon/export.h"
#include "ladon/tensor_view.h"

namespace ladon {

class Context;
class DeviceMemory;

/// Owns 64-byte aligned memory. Movable; a copy has to be named, because it costs. Views die with
/// the tensor, so a temporary gives none. Memory is freed where it came from, which may be after
/// the Context that made it has gone. Without a Context, memory is the host's.
class LADON_API Tensor {
 public:
  Tensor() = default;
  /// Zero-filled. Throws Error when a size is negative or the memory cannot be had.
  Tensor(const Context& context, DType dtype, const Dims& shape);
  Tensor(DType dtype, const Dims& shape);
  ~Tensor();
  Tensor(Tensor&& other) noexcept;
  Tensor& operator=(Tensor&& other) noexcept;
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;

  /// Memory whose content is not set: for outputs that are written whole.
  static Tensor uninitialized(const Context& context, DType dtype, const Dims& shape);
  static Tensor uninitialized(DType dtype, const Dims& shape);
  /// On the host: values in row-major order, rounded to dtype.
  static Tensor from_values(DType dtype, const Dims& shape, std::span<const double> values);
  static Tensor from_values(DType dtype, const Dims& shape, std::initializer_list<double> values) {
    return from_values(dtype, shape, std::span<const double>(values.begin(), values.size()));
  }
  /// A contiguous copy of any view on the Context's device or on the host, in the view's dtype or
  /// in another. It is where the view is.
  static Tensor copy_of(const Context& context, const ConstTensorView& view);
  static Tensor copy_of(const Context& context, const ConstTensorView& view, DType dtype);
  /// A copy on the Context's device, or on the host, wherever this tensor is.
  Tensor to(const Context& context) const;
  Tensor to_host() const;
  /// A copy where this tensor is.
  Tensor clone() const;

  TensorView view() &;
  ConstTensorView view() const&;
  TensorView view() && = delete;
  operator TensorView() & { return view(); }
  operator ConstTensorView() const& { return view(); }
  operator ConstTensorView() & { return static_cast<const Tensor&>(*this).view(); }

  /// On the tensor's device.
  void* data() noexcept { return data_; }
  const void* data() const noexcept { return data_; }
  template <class T>
  T* data_as() & {
    return view().template data_as<T>();
  }
  template <class T>
  const T* data_as() const& {
    return view().template data_as<T>();
  }
  DType dtype() const noexcept { return dtype_; }
  DeviceId device() const noexcept;
  const Dims& shape() const noexcept { return shape_; }
  int rank() const noexcept { return shape_.rank(); }
  std::int64_t size(int dim) const noexcept { return shape_[dim]; }
  std::int64_t num_elements() const noexcept;

 private:
  static Tensor allocate(const std::shared_ptr<DeviceMemory>& memory, DType dtype,
                         const Dims& shape);
  std::shared_ptr<DeviceMemory> memory_;  // null: nothing is held
  void* data_ = nullptr;
  DType dtype_ = DType::kF32;
  Dims shape_;
};

}  // namespace ladon
