// Division and rounding of counts. Not for kernels, which share no inline code.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ladon {

/// n / unit, rounded up. n >= 0, unit > 0.
constexpr std::int64_t ceil_div(std::int64_t n, std::int64_t unit) noexcept {
  return (n + unit - 1) / unit;
}

/// The least multiple of unit that is n or more.
constexpr std::size_t round_up(std::size_t n, std::size_t unit) noexcept {
  return (n + unit - 1) / unit * unit;
}

/// The product of counts; what does not fit becomes so large that no allocation can succeed.
constexpr std::size_t saturating_product(std::size_t a, std::size_t b) noexcept {
  constexpr std::size_t kTooMuch = std::size_t{1} << 62;
  std::size_t product = 0;
  if (__builtin_mul_overflow(a, b, &product) || product > kTooMuch) return kTooMuch;
  return product;
}

/// The sum of counts, with the same limit.
constexpr std::size_t saturating_sum(std::size_t a, std::size_t b) noexcept {
  constexpr std::size_t kTooMuch = std::size_t{1} << 62;
  std::size_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum) || sum > kTooMuch) return kTooMuch;
  return sum;
}

}  // namespace ladon
