// Names as people type them: other spellings of dtypes, and what was probably meant.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ladon/dtype.h"

namespace ladon::cli {

/// "f16", or as others call it: fp16, float16, half, F16. Case does not matter.
std::optional<DType> dtype_from_name(std::string_view name);

/// ", did you mean compare?" where one of the names is a few letters away, else nothing.
std::string did_you_mean(std::string_view given, const std::vector<std::string>& names);

}  // namespace ladon::cli
