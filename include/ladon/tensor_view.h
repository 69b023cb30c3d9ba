// Non-owning views of strided arrays: TensorView may write, ConstTensorView may not.
//
// A view is a pointer, a dtype, a device, a shape and strides. It is cheap to copy and never
// outlives its memory. Strides are in elements, int64_t, and may be zero (a broadcast dimension) or
// negative. A default-constructed view is "absent": that is how optional tensors are left out.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <type_traits>

#include "ladon/device.h"
#include "ladon/dtype.h"
#include "ladon/export.h"

namespace ladon {

class Context;

inline constexpr int kMaxRank = 8;

/// Up to kMaxRank sizes or strides, stored in place.
class LADON_API Dims {
 public:
  constexpr Dims() = default;
  Dims(std::initializer_list<std::int64_t> values);
  explicit Dims(std::span<const std::int64_t> values);

  int rank() const noexcept { return rank_; }
  /// No bounds check: dim must be in [0, rank()).
  std::int64_t operator[](int dim) const noexcept { return values_[static_cast<std::size_t>(dim)]; }
  std::int64_t& operator[](int dim) noexcept { return values_[static_cast<std::size_t>(dim)]; }
  const std::int64_t* begin() const noexcept { return values_.data(); }
  const std::int64_t* end() const noexcept { return values_.data() + rank_; }
  bool operator==(const Dims& other) const noexcept;

  /// "[2, 3, 4]".
  std::string to_string() const;

 private:
  std::array<std::int64_t, kMaxRank> values_{};
  int rank_ = 0;
};

/// The strides of a dense row-major array of this shape; sizes of 0 count as 1. Throws when a size
/// is negative or their product overflows.
LADON_API Dims row_major_strides(const Dims& shape);

namespace detail {

/// What both views share. Element is void or const void.
template <class Element>
class LADON_API BasicView {
 public:
  constexpr BasicView() = default;

  /// Dense row-major.
  BasicView(Element* data, DType dtype, const Dims& shape, DeviceId device = {})
      : BasicView(data, dtype, shape, row_major_strides(shape), device) {}

  /// Strided. Throws when the ranks differ, a size is negative, or the elements or the bytes they
  /// span cannot be counted.
  BasicView(Element* data, DType dtype, const Dims& shape, const Dims& strides,
            DeviceId device = {});

  /// A view that may write is also one that may read. A template, because a plain constructor would
  /// take the place of TensorView's own copy constructor.
  template <class Other>
  requires(std::is_const_v<Element>&& std::is_same_v<Other, void>)
      BasicView(const BasicView<Other>& other)
      : data_(other.data()),
        dtype_(other.dtype()),
        device_(other.device()),
        shape_(other.shape()),
        strides_(other.strides()) {}

  /// True for a default-constructed view: the tensor was left out.
  bool absent() const noexcept { return shape_.rank() == 0 && data_ == nullptr; }

  Element* data() const noexcept { return data_; }
  DType dtype() const noexcept { return dtype_; }
  DeviceId device() const noexcept { return device_; }
  const Dims& shape() const noexcept { return shape_; }
  const Dims& strides() const noexcept { return strides_; }
  int rank() const noexcept { return shape_.rank(); }
  std::int64_t size(int dim) const noexcept { return shape_[dim]; }
  std::int64_t stride(int dim) const noexcept { return strides_[dim]; }
  /// Product of the sizes; 1 for rank 0.
  std::int64_t num_elements() const noexcept;
  bool is_contiguous() const noexcept;

  /// data() as T*. Throws when T is not this view's dtype, and for memory that the host cannot
  /// read.
  template <class T>
  auto data_as() const {
    using Pointer = std::conditional_t<std::is_const_v<Element>, const T*, T*>;
    check_readable_as(dtype_of<T>);
    return static_cast<Pointer>(data_);
  }

  /// The same memory with two dimensions exchanged.
  BasicView transpose(int dim_a, int dim_b) const;
  /// Elements [begin, end) of one dimension.
  BasicView slice(int dim, std::int64_t begin, std::int64_t end) const;
  /// One index of a dimension, which disappears.
  BasicView select(int dim, std::int64_t index) const;
  /// Another shape of the same elements. Throws when the view is not contiguous.
  BasicView reshape(const Dims& shape) const;

 private:
  void check_readable_as(DType wanted) const;

  Element* data_ = nullptr;
  DType dtype_ = DType::kF32;
  DeviceId device_;
  Dims shape_;
  Dims strides_;
};

extern template class BasicView<void>;
extern template class BasicView<const void>;

}  // namespace detail

using TensorView = detail::BasicView<void>;

using ConstTensorView = detail::BasicView<const void>;

/// Copies every element of `from` to `to`, converting the dtype: round to nearest even; to integers
/// also the nearest that fits, and 0 for NaN; to bool whether it is not zero. Both are on the
/// Context's device, or one of them on the host. Throws when the shapes differ, when the two
/// overlap, or when two elements of `to` share memory.
LADON_API void copy(const Context& context, const ConstTensorView& from, const TensorView& to);

}  // namespace ladon
