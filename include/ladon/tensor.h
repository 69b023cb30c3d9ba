// Tensor: owns a dense row-major array and gives views of it.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>

#include "ladon/dtype.h"
#include "ladon/export.h"
#include "ladon/tensor_view.h"

namespace ladon {

/// Owns 64-byte aligned memory. Movable; a copy is asked for by name, because it costs. Views die
/// with the tensor, so a temporary gives none.
class LADON_API Tensor {
 public:
  Tensor() = default;
  /// Zero-filled. Throws Error when a size is negative or the memory cannot be had.
  Tensor(DType dtype, const Dims& shape);
  ~Tensor();
  Tensor(Tensor&& other) noexcept;
  Tensor& operator=(Tensor&& other) noexcept;
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;

  /// Memory whose content is not set: for outputs that are written whole.
  static Tensor uninitialized(DType dtype, const Dims& shape);
  /// Numbers in row-major order, rounded to dtype.
  static Tensor from_values(DType dtype, const Dims& shape, std::span<const double> values);
  static Tensor from_values(DType dtype, const Dims& shape, std::initializer_list<double> values) {
    return from_values(dtype, shape, std::span<const double>(values.begin(), values.size()));
  }
  /// A dense copy of any view, in the view's dtype or in another.
  static Tensor copy_of(const ConstTensorView& view);
  static Tensor copy_of(const ConstTensorView& view, DType dtype);

  TensorView view() &;
  ConstTensorView view() const&;
  TensorView view() && = delete;
  operator TensorView() & { return view(); }
  operator ConstTensorView() const& { return view(); }
  operator ConstTensorView() & { return static_cast<const Tensor&>(*this).view(); }

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
  Device device() const noexcept { return Device::kCpu; }
  const Dims& shape() const noexcept { return shape_; }
  int rank() const noexcept { return shape_.rank(); }
  std::int64_t size(int dim) const noexcept { return shape_[dim]; }
  std::int64_t num_elements() const noexcept;

 private:
  void* data_ = nullptr;
  DType dtype_ = DType::kF32;
  Dims shape_;
};

}  // namespace ladon
