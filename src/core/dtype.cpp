#include "ladon/dtype.h"

namespace ladon {

const char* name_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kF64: return "f64";
    case DType::kF32: return "f32";
    case DType::kF16: return "f16";
    case DType::kBF16: return "bf16";
    case DType::kBool: return "bool";
  }
  return "unknown";
}

double epsilon_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kF64: return 0x1p-52;
    case DType::kF32: return 0x1p-23;
    case DType::kF16: return 0x1p-10;
    case DType::kBF16: return 0x1p-7;
    case DType::kBool: return 0;
  }
  return 0;
}

}  // namespace ladon
