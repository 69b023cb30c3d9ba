// Random numbers by index: what fill_uniform() and fill_normal() write, one element at a time. In
// an unnamed namespace, as PhiloxBlock is.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

#include "core/philox.h"

namespace ladon {
namespace {

/// Philox's words for one position of a stream.
[[maybe_unused]] constexpr PhiloxBlock random_block(std::uint64_t position, std::uint64_t stream,
                                                    std::uint64_t seed) noexcept {
  const auto low = [](std::uint64_t value) { return static_cast<std::uint32_t>(value); };
  const auto high = [](std::uint64_t value) { return static_cast<std::uint32_t>(value >> 32); };
  return philox_block({{low(position), high(position), low(stream), high(stream)}}, seed);
}

/// Uniform in [0, 1): as many bits as a double's mantissa has.
[[maybe_unused]] constexpr double to_unit(std::uint32_t low, std::uint32_t high) noexcept {
  const std::uint64_t bits = (static_cast<std::uint64_t>(high) << 32) | low;
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

/// Standard normal, from two uniform numbers.
[[maybe_unused]] inline double box_muller(double first, double second) noexcept {
  // 1 - first is in (0, 1], so that the logarithm is finite.
  return std::sqrt(-2 * std::log(1 - first)) * std::cos(2 * std::numbers::pi * second);
}

}  // namespace
}  // namespace ladon
