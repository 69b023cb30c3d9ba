#include "units.h"

#include <array>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <limits>
#include <system_error>

#include "failure.h"

namespace ladon::cli {
namespace {

struct Unit {
  std::string_view name;
  double bytes;
};

constexpr std::array<Unit, 16> kUnits{{{"", 1},
                                       {"B", 1},
                                       {"KiB", 0x1p10},
                                       {"MiB", 0x1p20},
                                       {"GiB", 0x1p30},
                                       {"TiB", 0x1p40},
                                       {"PiB", 0x1p50},
                                       {"K", 0x1p10},
                                       {"M", 0x1p20},
                                       {"G", 0x1p30},
                                       {"T", 0x1p40},
                                       {"kB", 1e3},
                                       {"KB", 1e3},
                                       {"MB", 1e6},
                                       {"GB", 1e9},
                                       {"TB", 1e12}}};

std::string in_quotes(std::string_view text) { return "'" + std::string(text) + "'"; }

/// With this many digits after the point.
std::string fixed(double value, int digits) {
  std::array<char, 64> text{};
  const int size = std::snprintf(text.data(), text.size(), "%.*f", digits, value);
  return {text.data(), static_cast<std::size_t>(size)};
}

}  // namespace

std::int64_t parse_count(std::string_view text, std::int64_t least, std::int64_t most) {
  std::string_view digits = text;
  std::int64_t factor = 1;
  if (!digits.empty()) {
    const char last = digits.back();
    if (last == 'k' || last == 'K') factor = std::int64_t{1} << 10;
    if (last == 'm' || last == 'M') factor = std::int64_t{1} << 20;
    if (factor != 1) digits.remove_suffix(1);
  }
  std::int64_t count = 0;
  const char* const end = digits.data() + digits.size();
  const auto [stop, error] = std::from_chars(digits.data(), end, count);
  const bool understood = error == std::errc{} && stop == end && !digits.empty();
  if (!understood || __builtin_mul_overflow(count, factor, &count) || count < least ||
      count > most) {
    throw UsageError(in_quotes(text) + " is not a whole number from " + std::to_string(least) +
                     " to " + std::to_string(most));
  }
  return count;
}

std::int64_t parse_bytes(std::string_view text) {
  const char* const end = text.data() + text.size();
  double number = 0;
  const auto [stop, error] = std::from_chars(text.data(), end, number, std::chars_format::fixed);
  if (error == std::errc{}) {
    std::string_view name(stop, static_cast<std::size_t>(end - stop));
    while (name.starts_with(' ')) name.remove_prefix(1);
    for (const Unit& unit : kUnits) {
      const double bytes = number * unit.bytes;
      if (unit.name == name && bytes >= 1 && bytes < 0x1p62) {
        return static_cast<std::int64_t>(bytes);
      }
    }
  }
  throw UsageError(in_quotes(text) +
                   " is not a size: expected a positive number and a unit, such as 80GiB or 24GB");
}

std::string format_bytes(std::int64_t bytes) {
  constexpr std::array<const char*, 7> kNames{"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  auto value = static_cast<double>(bytes);
  std::size_t power = 0;
  while (value >= 1024 && power + 1 < kNames.size()) {
    value /= 1024;
    ++power;
  }
  std::string text = fixed(value, 2);
  if (text.ends_with(".00")) text.resize(text.size() - 3);
  return text + " " + kNames[power];
}

std::string format_count(std::int64_t count) {
  std::string text = std::to_string(count);
  const std::size_t first = count < 0 ? 1 : 0;
  for (std::size_t i = text.size(); i > first + 3;) {
    i -= 3;
    text.insert(i, ",");
  }
  return text;
}

std::string format_percent(double fraction) { return fixed(100 * fraction, 1) + " %"; }

std::string format_rate(double value) {
  if (value >= 1000) return format_count(std::llround(value));
  if (value >= 100) return fixed(value, 1);
  return fixed(value, 2);
}

std::string format_time(double seconds) {
  if (seconds < 1e-3) return format_rate(seconds * 1e6) + " us";
  if (seconds < 1) return format_rate(seconds * 1e3) + " ms";
  return format_rate(seconds) + " s";
}

std::string format_duration(double seconds) {
  const auto whole = [](double value, const char* unit) {
    return std::to_string(static_cast<std::int64_t>(std::ceil(value))) + unit;
  };
  if (seconds <= 90) return whole(seconds, " s");
  return seconds <= 90 * 60 ? whole(seconds / 60, " min") : whole(seconds / 3600, " h");
}

std::string format_error(double value) {
  if (value == 0) return "0";
  std::array<char, 64> text{};
  const int size = std::snprintf(text.data(), text.size(), "%.1e", value);
  return {text.data(), static_cast<std::size_t>(size)};
}

}  // namespace ladon::cli
