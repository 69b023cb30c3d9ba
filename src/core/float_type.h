// with_float_type(): from a dtype that is known at run time to the C++ type of its elements.
#pragma once

#include <type_traits>

#include "ladon/dtype.h"

namespace ladon {

/// The type that elements of a float type are computed in.
template <class Element>
using ComputeOf = std::conditional_t<std::is_same_v<Element, double>, double, float>;

/// Calls function<Element>() with the type of a float dtype's elements; does nothing for the
/// others, which the callers' checks have refused. Names them all, so that the compiler points here
/// when there is a new one.
template <class Function>
void with_float_type(DType dtype, const Function& function) {
  switch (dtype) {
    case DType::kF64: return function.template operator()<double>();
    case DType::kF32: return function.template operator()<float>();
    case DType::kF16: return function.template operator()<float16>();
    case DType::kBF16: return function.template operator()<bfloat16>();
    case DType::kBool:
    case DType::kI8:
    case DType::kU8:
    case DType::kI16:
    case DType::kU16:
    case DType::kI32:
    case DType::kU32:
    case DType::kI64:
    case DType::kU64:
    case DType::kF8E4M3: return;
  }
}

}  // namespace ladon
