// Where an element lies; and its value as a double, whatever the dtype, for code where speed does
// not matter.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "ladon/dtype.h"
#include "ladon/tensor_view.h"

namespace ladon {

/// How many elements the given leading indices lie from the start of the view.
template <class Element>
std::int64_t offset_of(const detail::BasicView<Element>& view,
                       std::initializer_list<std::int64_t> indices) noexcept {
  std::int64_t offset = 0;
  int dim = 0;
  for (const std::int64_t index : indices) offset += index * view.stride(dim++);
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

inline double load_element(const void* data, DType dtype, std::int64_t index) noexcept {
  switch (dtype) {
    case DType::kF64: return static_cast<const double*>(data)[index];
    case DType::kF32: return static_cast<double>(static_cast<const float*>(data)[index]);
    case DType::kF16:
      return static_cast<double>(static_cast<float>(static_cast<const float16*>(data)[index]));
    case DType::kBF16:
      return static_cast<double>(static_cast<float>(static_cast<const bfloat16*>(data)[index]));
    case DType::kBool: return static_cast<const std::uint8_t*>(data)[index] != 0 ? 1.0 : 0.0;
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
  }
}

}  // namespace ladon
