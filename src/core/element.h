// The address of an element; and its value as a double, whatever the dtype, for code where speed
// does not matter. A double holds every value but those of i64 and u64 beyond 2^53, which are
// rounded.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <type_traits>

#include "core/attention_params.h"
#include "core/projection_params.h"
#include "ladon/dtype.h"
#include "ladon/tensor_view.h"

namespace ladon {

/// The offset of the given leading indices from the start of the view, in elements.
template <class Element>
std::int64_t offset_of(const detail::BasicView<Element>& view,
                       std::initializer_list<std::int64_t> indices) noexcept {
  std::int64_t offset = 0;
  int dim = 0;
  for (const std::int64_t index : indices) offset += index * view.stride(dim++);
  return offset;
}

/// Offset of element number `index`, in row-major order.
inline std::int64_t offset_of_element(const TensorView& view, std::int64_t index) noexcept {
  std::int64_t offset = 0;
  for (int dim = view.rank() - 1; dim >= 0; --dim) {
    offset += index % view.size(dim) * view.stride(dim);
    index /= view.size(dim);
  }
  return offset;
}

/// Null for an empty tensor's null.
inline const void* element_at(const void* data, DType dtype, std::int64_t index) noexcept {
  if (data == nullptr) return nullptr;
  return static_cast<const std::byte*>(data) + index * static_cast<std::int64_t>(size_of(dtype));
}
inline void* element_at(void* data, DType dtype, std::int64_t index) noexcept {
  if (data == nullptr) return nullptr;
  return static_cast<std::byte*>(data) + index * static_cast<std::int64_t>(size_of(dtype));
}

/// The nearest integer, ties to even; the nearest there is for numbers out of range; 0 for NaN. A
/// plain cast is undefined where the number does not fit.
template <class Integer>
Integer round_to_integer(double value) noexcept {
  static_assert(std::is_integral_v<Integer>);
  using Limits = std::numeric_limits<Integer>;
  if (std::isnan(value)) return 0;
  const double rounded = std::nearbyint(value);
  if (rounded <= static_cast<double>(Limits::min())) return Limits::min();
  // The largest 64-bit integers are not doubles and round up to powers of two: hence ">=".
  if (rounded >= static_cast<double>(Limits::max())) return Limits::max();
  return static_cast<Integer>(rounded);
}

namespace detail {

template <class Integer>
double load_integer(const void* data, std::int64_t index) noexcept {
  return static_cast<double>(static_cast<const Integer*>(data)[index]);
}

template <class Integer>
void store_integer(void* data, std::int64_t index, double value) noexcept {
  static_cast<Integer*>(data)[index] = round_to_integer<Integer>(value);
}

}  // namespace detail

inline double load_element(const void* data, DType dtype, std::int64_t index) noexcept {
  switch (dtype) {
    case DType::kF64: return static_cast<const double*>(data)[index];
    case DType::kF32: return static_cast<double>(static_cast<const float*>(data)[index]);
    case DType::kF16:
      return static_cast<double>(static_cast<float>(static_cast<const float16*>(data)[index]));
    case DType::kBF16:
      return static_cast<double>(static_cast<float>(static_cast<const bfloat16*>(data)[index]));
    case DType::kBool: return static_cast<const std::uint8_t*>(data)[index] != 0 ? 1.0 : 0.0;
    case DType::kI8: return detail::load_integer<std::int8_t>(data, index);
    case DType::kU8: return detail::load_integer<std::uint8_t>(data, index);
    case DType::kI16: return detail::load_integer<std::int16_t>(data, index);
    case DType::kU16: return detail::load_integer<std::uint16_t>(data, index);
    case DType::kI32: return detail::load_integer<std::int32_t>(data, index);
    case DType::kU32: return detail::load_integer<std::uint32_t>(data, index);
    case DType::kI64: return detail::load_integer<std::int64_t>(data, index);
    case DType::kU64: return detail::load_integer<std::uint64_t>(data, index);
    case DType::kF8E4M3:
      return static_cast<double>(static_cast<float>(static_cast<const float8_e4m3*>(data)[index]));
  }
  return 0;
}

inline void store_element(void* data, DType dtype, std::int64_t index, double value) noexcept {
  switch (dtype) {
    case DType::kF64: static_cast<double*>(data)[index] = value; return;
    case DType::kF32: static_cast<float*>(data)[index] = static_cast<float>(value); return;
    case DType::kF16: static_cast<float16*>(data)[index] = float16(value); return;
    case DType::kBF16: static_cast<bfloat16*>(data)[index] = bfloat16(value); return;
    case DType::kBool:
      static_cast<std::uint8_t*>(data)[index] = static_cast<std::uint8_t>(value != 0);
      return;
    case DType::kI8: detail::store_integer<std::int8_t>(data, index, value); return;
    case DType::kU8: detail::store_integer<std::uint8_t>(data, index, value); return;
    case DType::kI16: detail::store_integer<std::int16_t>(data, index, value); return;
    case DType::kU16: detail::store_integer<std::uint16_t>(data, index, value); return;
    case DType::kI32: detail::store_integer<std::int32_t>(data, index, value); return;
    case DType::kU32: detail::store_integer<std::uint32_t>(data, index, value); return;
    case DType::kI64: detail::store_integer<std::int64_t>(data, index, value); return;
    case DType::kU64: detail::store_integer<std::uint64_t>(data, index, value); return;
    case DType::kF8E4M3: static_cast<float8_e4m3*>(data)[index] = float8_e4m3(value); return;
  }
}

/// The same projection for one head alone.
inline ProjectionParams of_head(ProjectionParams params, std::int64_t head) noexcept {
  const auto advance = [head](Matrix& matrix, std::int64_t step) {
    matrix.data = element_at(matrix.data, matrix.dtype, head * step);
  };
  advance(params.x, params.steps.x);
  advance(params.dx, params.steps.x);
  advance(params.w, params.steps.w);
  advance(params.y, params.steps.y);
  params.steps = {};
  return params;
}

inline double head_element(const HeadOperand& operand, std::int64_t head) noexcept {
  return load_element(operand.data, operand.dtype, head * operand.stride);
}

}  // namespace ladon
