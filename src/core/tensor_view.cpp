#include "ladon/tensor_view.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <limits>
#include <string_view>
#include <utility>

#include "core/fail.h"
#include "core/overlap.h"

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
  std::int64_t count = 1;
  for (const std::int64_t size : shape) {
    if (size < 0) fail(operation, "shape", shape.to_string() + " came, sizes must not be negative");
  }
  for (const std::int64_t size : shape) {
    count = multiply_or_minus_one(count, std::max<std::int64_t>(size, 1));
    if (count < 0) fail(operation, "shape", shape.to_string() + " came, its product overflows");
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
           strides.to_string() + " came, over shape " + shape.to_string() +
               " they reach farther than memory does");
    }
    span += reach;
  }
}

void check_dim(std::string_view operation, std::string_view argument, int dim, int rank) {
  if (dim >= 0 && dim < rank) return;
  fail(operation, argument,
       std::to_string(dim) + " came, expected a dimension in [0, " + std::to_string(rank) + ")");
}

template <class Element>
Element* advance(Element* data, DType dtype, std::int64_t elements) noexcept {
  using Byte = std::conditional_t<std::is_const_v<Element>, const std::byte, std::byte>;
  return static_cast<Byte*>(data) + elements * static_cast<std::int64_t>(size_of(dtype));
}

}  // namespace

Dims::Dims(std::initializer_list<std::int64_t> values)
    : Dims(std::span<const std::int64_t>(values.begin(), values.size())) {}

Dims::Dims(std::span<const std::int64_t> values) {
  if (values.size() > kMaxRank) {
    fail("Dims", "values",
         std::to_string(values.size()) + " dimensions came, expected at most " +
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
                              Device device)
    : data_(data), dtype_(dtype), device_(device), shape_(shape), strides_(strides) {
  if (shape.rank() != strides.rank()) {
    fail("TensorView", "strides",
         strides.to_string() + " came, shape " + shape.to_string() + " needs " +
             std::to_string(shape.rank()) + " of them");
  }
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
void BasicView<Element>::check_dtype(DType wanted) const {
  if (wanted == dtype_) return;
  fail("data_as", "T", std::string(name_of(wanted)) + " came, the view holds " + name_of(dtype_));
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
         "[" + std::to_string(begin) + ", " + std::to_string(end) +
             ") came, expected a range within [0, " + std::to_string(size(dim)) +
             ") of dimension " + std::to_string(dim) + " of " + shape_.to_string());
  }
  BasicView result = *this;
  result.shape_[dim] = end - begin;
  // An empty view keeps its pointer: it may be null, or the step may leave the array.
  if (result.num_elements() != 0) result.data_ = advance(data_, dtype_, begin * stride(dim));
  return result;
}

template <class Element>
BasicView<Element> BasicView<Element>::select(int dim, std::int64_t index) const {
  check_dim("select", "dim", dim, rank());
  if (index < 0 || index >= size(dim)) {
    fail("select", "index",
         std::to_string(index) + " came, expected one in [0, " + std::to_string(size(dim)) +
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
         "strides " + strides_.to_string() + " over shape " + shape_.to_string() +
             " came, expected a contiguous view");
  }
  const BasicView result(data_, dtype_, shape, device_);
  if (result.num_elements() != num_elements()) {
    fail("reshape", "shape",
         shape.to_string() + " came, with " + std::to_string(result.num_elements()) +
             " elements; the view " + shape_.to_string() + " has " +
             std::to_string(num_elements()));
  }
  return result;
}

template class BasicView<void>;
template class BasicView<const void>;

}  // namespace detail

namespace {

/// How a bool lies in memory: any byte, where a C++ bool may hold 0 and 1 alone.
struct BoolByte {
  std::uint8_t byte;
};

template <class To, class From>
To convert(From value) noexcept {
  if constexpr (std::is_same_v<To, From>) {
    return value;
  } else if constexpr (std::is_same_v<From, BoolByte>) {
    return static_cast<To>(value.byte != 0 ? 1.0F : 0.0F);
  } else if constexpr (std::is_same_v<From, double>) {
    if constexpr (std::is_same_v<To, BoolByte>) {
      return {static_cast<std::uint8_t>(value != 0)};
    } else {
      return static_cast<To>(value);
    }
  } else if constexpr (std::is_same_v<To, BoolByte>) {
    return {static_cast<std::uint8_t>(static_cast<float>(value) != 0)};
  } else {
    return static_cast<To>(static_cast<float>(value));
  }
}

struct CopyRow {
  std::int64_t count;
  std::int64_t from_stride;
  std::int64_t to_stride;
};

using CopyRowFunction = void (*)(const void* from, void* to, const CopyRow& row);

template <class From, class To>
void copy_row(const void* from, void* to, const CopyRow& row) {
  const auto* source = static_cast<const From*>(from);
  auto* target = static_cast<To*>(to);
  if (std::is_same_v<From, To> && row.from_stride == 1 && row.to_stride == 1) {
    std::memcpy(to, from, static_cast<std::size_t>(row.count) * sizeof(To));
    return;
  }
  for (std::int64_t i = 0; i < row.count; ++i) {
    target[i * row.to_stride] = convert<To>(source[i * row.from_stride]);
  }
}

template <class From>
CopyRowFunction copy_row_from(DType to) noexcept {
  switch (to) {
    case DType::kF64: return copy_row<From, double>;
    case DType::kF32: return copy_row<From, float>;
    case DType::kF16: return copy_row<From, float16>;
    case DType::kBF16: return copy_row<From, bfloat16>;
    case DType::kBool: break;
  }
  return copy_row<From, BoolByte>;
}

CopyRowFunction choose_copy_row(DType from, DType to) noexcept {
  switch (from) {
    case DType::kF64: return copy_row_from<double>(to);
    case DType::kF32: return copy_row_from<float>(to);
    case DType::kF16: return copy_row_from<float16>(to);
    case DType::kBF16: return copy_row_from<bfloat16>(to);
    case DType::kBool: break;
  }
  return copy_row_from<BoolByte>(to);
}

/// The loops of a copy, outermost first: dimensions that both views walk as one are one loop.
struct CopyLoops {
  std::array<CopyRow, kMaxRank> loops{};
  int count = 0;

  CopyLoops(const ConstTensorView& from, const TensorView& to) noexcept {
    for (int dim = 0; dim < from.rank(); ++dim) {
      if (from.size(dim) == 1) continue;
      const CopyRow next{from.size(dim), from.stride(dim), to.stride(dim)};
      if (count != 0) {
        CopyRow& outer = loops[static_cast<std::size_t>(count - 1)];
        if (outer.from_stride == next.from_stride * next.count &&
            outer.to_stride == next.to_stride * next.count) {
          outer = {outer.count * next.count, next.from_stride, next.to_stride};
          continue;
        }
      }
      loops[static_cast<std::size_t>(count++)] = next;
    }
  }
};

void check_cpu_memory(std::string_view argument, const ConstTensorView& view) {
  if (view.device() != Device::kCpu) {
    fail(ErrorCode::kUnsupported, "copy", argument, "CUDA memory came, expected CPU memory");
  }
  if (view.data() == nullptr && view.num_elements() != 0) {
    fail("copy", argument,
         "a null pointer came, expected the " + std::to_string(view.num_elements()) +
             " elements of shape " + view.shape().to_string());
  }
}

}  // namespace

void copy(const ConstTensorView& from, const TensorView& to) {
  if (!(from.shape() == to.shape())) {
    fail("copy", "to",
         "shape " + to.shape().to_string() + " came, expected that of from, " +
             from.shape().to_string());
  }
  check_cpu_memory("from", from);
  check_cpu_memory("to", to);
  if (overlaps(from, to)) fail("copy", "to", "it shares memory with from");
  if (overlaps_itself(to)) {
    fail("copy", "to",
         "strides " + to.strides().to_string() + " over shape " + to.shape().to_string() +
             " came, expected elements that do not share memory");
  }
  if (from.num_elements() == 0) return;

  const CopyRowFunction copy_one_row = choose_copy_row(from.dtype(), to.dtype());
  const CopyLoops plan(from, to);
  const int outer_count = std::max(plan.count - 1, 0);
  const CopyRow row =
      plan.count == 0 ? CopyRow{1, 1, 1} : plan.loops[static_cast<std::size_t>(outer_count)];
  std::array<std::int64_t, kMaxRank> index{};
  std::int64_t from_offset = 0;
  std::int64_t to_offset = 0;
  for (;;) {
    copy_one_row(advance(from.data(), from.dtype(), from_offset),
                 advance(to.data(), to.dtype(), to_offset), row);
    // Count up like an odometer: the innermost loop first, carrying outwards.
    int loop = outer_count - 1;
    for (; loop >= 0; --loop) {
      const CopyRow& outer = plan.loops[static_cast<std::size_t>(loop)];
      std::int64_t& position = index[static_cast<std::size_t>(loop)];
      from_offset += outer.from_stride;
      to_offset += outer.to_stride;
      if (++position < outer.count) break;
      from_offset -= outer.from_stride * outer.count;
      to_offset -= outer.to_stride * outer.count;
      position = 0;
    }
    if (loop < 0) return;
  }
}

}  // namespace ladon
