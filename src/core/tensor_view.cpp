#include "ladon/tensor_view.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <string_view>
#include <utility>

#include "core/checks.h"
#include "core/element.h"
#include "core/fail.h"

namespace ladon {
namespace {

constexpr std::int64_t kMaxInt64 = std::numeric_limits<std::int64_t>::max();

// A quarter of what int64_t holds, so that code that compares two views can add their spans.
constexpr std::int64_t kMaxSpanBytes = kMaxInt64 / 4;

/// a * b for a, b >= 0; -1 when that overflows.
constexpr std::int64_t multiply_or_minus_one(std::int64_t a, std::int64_t b) noexcept {
  return a != 0 && b > kMaxInt64 / a ? -1 : a * b;
}

void check_sizes(std::string_view operation, const Dims& shape) {
  check_no_negative_size(operation, "shape", shape);
  std::int64_t count = 1;
  for (const std::int64_t size : shape) {
    count = multiply_or_minus_one(count, std::max<std::int64_t>(size, 1));
    if (count < 0) {
      fail(operation, "shape", "got " + shape.to_string() + ", expected a size that fits 64 bits");
    }
  }
}

void check_span(const Dims& shape, const Dims& strides, DType dtype) {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return;
  const std::int64_t limit = kMaxSpanBytes / static_cast<std::int64_t>(size_of(dtype));
  std::int64_t span = 1;
  for (int dim = 0; dim < shape.rank(); ++dim) {
    const std::int64_t steps = shape[dim] - 1;
    if (steps == 0) continue;
    // The most negative stride has no absolute value; it is too far anyway.
    const std::int64_t stride = strides[dim] < -kMaxInt64 ? kMaxInt64
                                : strides[dim] < 0        ? -strides[dim]
                                                          : strides[dim];
    const std::int64_t reach = multiply_or_minus_one(steps, stride);
    if (reach < 0 || reach > limit - span) {
      fail("TensorView", "strides",
           "got " + strides.to_string() + " over shape " + shape.to_string() +
               ", expected a span that fits the address space");
    }
    span += reach;
  }
}

void check_dim(std::string_view operation, std::string_view argument, int dim, int rank) {
  if (dim >= 0 && dim < rank) return;
  fail(
      operation, argument,
      "got " + std::to_string(dim) + ", expected a dimension in [0, " + std::to_string(rank) + ")");
}

}  // namespace

Dims::Dims(std::initializer_list<std::int64_t> values)
    : Dims(std::span<const std::int64_t>(values.begin(), values.size())) {}

Dims::Dims(std::span<const std::int64_t> values) {
  if (values.size() > kMaxRank) {
    fail("Dims", "values",
         "got " + std::to_string(values.size()) + " dimensions, expected at most " +
             std::to_string(kMaxRank));
  }
  std::copy(values.begin(), values.end(), values_.begin());
  rank_ = static_cast<int>(values.size());
}

bool Dims::operator==(const Dims& other) const noexcept {
  return std::equal(begin(), end(), other.begin(), other.end());
}

std::string Dims::to_string() const {
  std::string text = "[";
  for (int dim = 0; dim < rank_; ++dim) {
    if (dim != 0) text += ", ";
    text += std::to_string((*this)[dim]);
  }
  return text + "]";
}

Dims row_major_strides(const Dims& shape) {
  check_sizes("row_major_strides", shape);
  Dims strides = shape;
  std::int64_t stride = 1;
  for (int dim = shape.rank() - 1; dim >= 0; --dim) {
    strides[dim] = stride;
    stride *= std::max<std::int64_t>(shape[dim], 1);
  }
  return strides;
}

namespace detail {

template <class Element>
BasicView<Element>::BasicView(Element* data, DType dtype, const Dims& shape, const Dims& strides,
                              DeviceId device)
    : data_(data), dtype_(dtype), device_(device), shape_(shape), strides_(strides) {
  if (shape.rank() != strides.rank()) {
    fail("TensorView", "strides",
         "got " + strides.to_string() + ", expected " + std::to_string(shape.rank()) +
             " strides for shape " + shape.to_string());
  }
  check_known("TensorView", "dtype", dtype);
  check_sizes("TensorView", shape);
  check_span(shape, strides, dtype);
}

template <class Element>
std::int64_t BasicView<Element>::num_elements() const noexcept {
  std::int64_t count = 1;
  for (const std::int64_t size : shape_) count *= size;
  return count;
}

template <class Element>
bool BasicView<Element>::is_contiguous() const noexcept {
  if (num_elements() == 0) return true;
  std::int64_t expected = 1;
  for (int dim = rank() - 1; dim >= 0; --dim) {
    if (size(dim) == 1) continue;  // its stride is never used
    if (stride(dim) != expected) return false;
    expected *= size(dim);
  }
  return true;
}

template <class Element>
void BasicView<Element>::check_readable_as(DType wanted) const {
  if (!device_.is_cpu()) {
    fail("data_as", "view",
         "got memory of " + device_.to_string() +
             ", which the host cannot read, expected a copy of it: Tensor::to() makes one");
  }
  if (wanted == dtype_) return;
  fail("data_as", "T",
       std::string("got dtype ") + name_of(wanted) + ", expected the view's " + name_of(dtype_));
}

template <class Element>
BasicView<Element> BasicView<Element>::transpose(int dim_a, int dim_b) const {
  check_dim("transpose", "dim_a", dim_a, rank());
  check_dim("transpose", "dim_b", dim_b, rank());
  BasicView result = *this;
  std::swap(result.shape_[dim_a], result.shape_[dim_b]);
  std::swap(result.strides_[dim_a], result.strides_[dim_b]);
  return result;
}

template <class Element>
BasicView<Element> BasicView<Element>::slice(int dim, std::int64_t begin, std::int64_t end) const {
  check_dim("slice", "dim", dim, rank());
  if (begin < 0 || begin > end || end > size(dim)) {
    fail("slice", "begin, end",
         "got [" + std::to_string(begin) + ", " + std::to_string(end) +
             "), expected a range within [0, " + std::to_string(size(dim)) + ") of dimension " +
             std::to_string(dim) + " of " + shape_.to_string());
  }
  BasicView result = *this;
  result.shape_[dim] = end - begin;
  // An empty view keeps its pointer: it may be null, or the step may leave the array.
  if (result.num_elements() != 0) result.data_ = element_at(data_, dtype_, begin * stride(dim));
  return result;
}

template <class Element>
BasicView<Element> BasicView<Element>::select(int dim, std::int64_t index) const {
  check_dim("select", "dim", dim, rank());
  if (index < 0 || index >= size(dim)) {
    fail("select", "index",
         "got " + std::to_string(index) + ", expected one in [0, " + std::to_string(size(dim)) +
             ") of dimension " + std::to_string(dim) + " of " + shape_.to_string());
  }
  std::array<std::int64_t, kMaxRank> sizes{};
  std::array<std::int64_t, kMaxRank> steps{};
  std::size_t kept = 0;
  for (int other = 0; other < rank(); ++other) {
    if (other == dim) continue;
    sizes[kept] = size(other);
    steps[kept] = stride(other);
    ++kept;
  }
  BasicView result = slice(dim, index, index + 1);
  result.shape_ = Dims(std::span<const std::int64_t>(sizes.data(), kept));
  result.strides_ = Dims(std::span<const std::int64_t>(steps.data(), kept));
  return result;
}

template <class Element>
BasicView<Element> BasicView<Element>::reshape(const Dims& shape) const {
  if (!is_contiguous()) {
    fail("reshape", "view",
         "got strides " + strides_.to_string() + " over shape " + shape_.to_string() +
             ", expected a contiguous view");
  }
  const BasicView result(data_, dtype_, shape, device_);
  if (result.num_elements() != num_elements()) {
    fail("reshape", "shape",
         "got " + shape.to_string() + " with " + std::to_string(result.num_elements()) +
             " elements, expected " + std::to_string(num_elements()) + " as in the view's " +
             shape_.to_string());
  }
  return result;
}

template class BasicView<void>;
template class BasicView<const void>;

}  // namespace detail

}  // namespace ladon
