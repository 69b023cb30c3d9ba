// KvFormat: how a cache stores its elements.
#pragma once

#include "ladon/dtype.h"

namespace ladon {

/// Whether elements of this dtype are dequantised with a scale.
constexpr bool needs_scale(DType dtype) noexcept {
  switch (dtype) {
    case DType::kI8:
    case DType::kF8E4M3: return true;
    case DType::kF64:
    case DType::kF32:
    case DType::kF16:
    case DType::kBF16:
    case DType::kBool:
    case DType::kU8:
    case DType::kI16:
    case DType::kU16:
    case DType::kI32:
    case DType::kU32:
    case DType::kI64:
    case DType::kU64: return false;
  }
  return false;
}

/// Floats are stored as they are; int8 and fp8 (f8e4m3) are quantised, with one f32 scale per token
/// and head.
struct KvFormat {
  DType dtype = DType::kF32;
  bool scaled = false;

  constexpr KvFormat() = default;
  constexpr KvFormat(DType stored) noexcept : dtype(stored), scaled(needs_scale(stored)) {}

  bool operator==(const KvFormat&) const = default;
};

}  // namespace ladon
