#include "ladon/alibi.h"

#include <bit>
#include <cmath>
#include <cstddef>
#include <exception>
#include <string>

#include "core/fail.h"

namespace ladon {

std::vector<double> alibi_slopes(std::int64_t num_heads) {
  constexpr std::string_view kOperation = "alibi_slopes";
  if (num_heads <= 0) {
    fail(kOperation, "num_heads", "got " + std::to_string(num_heads) + ", expected 1 or more");
  }
  std::vector<double> slopes;
  try {
    slopes.reserve(static_cast<std::size_t>(num_heads));
  } catch (const std::exception&) {  // bad_alloc or length_error
    fail(ErrorCode::kOutOfMemory, kOperation, "num_heads",
         "got " + std::to_string(num_heads) + ", expected a size that fits the memory");
  }
  const auto below =
      static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(num_heads)));
  const auto power = static_cast<double>(below);
  for (std::int64_t i = 1; i <= below; ++i) {
    slopes.push_back(std::exp2(-8.0 * static_cast<double>(i) / power));
  }
  for (std::int64_t i = 1; i <= num_heads - below; ++i) {
    slopes.push_back(std::exp2(-4.0 * static_cast<double>(2 * i - 1) / power));
  }
  return slopes;
}

}  // namespace ladon
