#include "names.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <numeric>
#include <utility>

namespace ladon::cli {
namespace {

std::string lower(std::string_view text) {
  std::string result(text);
  for (char& letter : result) {
    letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  }
  return result;
}

/// Letters to insert, remove, replace or exchange with their neighbour.
std::size_t distance(const std::string& a, const std::string& b) {
  std::vector<std::size_t> before(b.size() + 1);
  std::vector<std::size_t> above(b.size() + 1);
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(above.begin(), above.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      row[j] =
          std::min({above[j] + 1, row[j - 1] + 1, above[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        row[j] = std::min(row[j], before[j - 2] + 1);
      }
    }
    before = std::exchange(above, row);
  }
  return above[b.size()];
}

}  // namespace

std::optional<DType> dtype_from_name(std::string_view name) {
  constexpr std::array<std::pair<std::string_view, DType>, 22> kNames{{
      {"f64", DType::kF64},       {"fp64", DType::kF64},
      {"float64", DType::kF64},   {"double", DType::kF64},
      {"f32", DType::kF32},       {"fp32", DType::kF32},
      {"float32", DType::kF32},   {"float", DType::kF32},
      {"single", DType::kF32},    {"f16", DType::kF16},
      {"fp16", DType::kF16},      {"float16", DType::kF16},
      {"half", DType::kF16},      {"bf16", DType::kBF16},
      {"bfloat16", DType::kBF16}, {"i8", DType::kI8},
      {"int8", DType::kI8},       {"f8e4m3", DType::kF8E4M3},
      {"f8", DType::kF8E4M3},     {"fp8", DType::kF8E4M3},
      {"float8", DType::kF8E4M3}, {"float8_e4m3fn", DType::kF8E4M3},
  }};
  const std::string wanted = lower(name);
  for (const auto& [spelling, dtype] : kNames) {
    if (spelling == wanted) return dtype;
  }
  return {};
}

std::string did_you_mean(std::string_view given, const std::vector<std::string>& names) {
  const std::string wanted = lower(given);
  // A third of the letters may be wrong: two of "conpare", none of "f4".
  std::size_t nearest = wanted.size() / 3 + 1;
  const std::string* best = nullptr;
  for (const std::string& name : names) {
    const std::size_t away = distance(wanted, lower(name));
    if (away >= nearest) continue;
    nearest = away;
    best = &name;
  }
  return best == nullptr ? std::string() : ", did you mean " + *best + "?";
}

}  // namespace ladon::cli
