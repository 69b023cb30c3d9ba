#include "ladon/random.h"

#include <bit>
#include <cmath>
#include <numbers>
#include <string>
#include <string_view>

#include "core/checks.h"
#include "core/element.h"
#include "core/fail.h"
#include "core/philox.h"

namespace ladon {
namespace {

constexpr std::uint32_t low_word(std::uint64_t value) noexcept {
  return static_cast<std::uint32_t>(value);
}
constexpr std::uint32_t high_word(std::uint64_t value) noexcept {
  return static_cast<std::uint32_t>(value >> 32);
}

std::array<std::uint32_t, 4> block_at(std::uint64_t position, std::uint64_t stream,
                                      std::uint64_t seed) noexcept {
  return philox({low_word(position), high_word(position), low_word(stream), high_word(stream)},
                seed);
}

/// Uniform in [0, 1): as many bits as a double's mantissa has.
double to_unit(std::uint32_t low, std::uint32_t high) noexcept {
  const std::uint64_t bits = (static_cast<std::uint64_t>(high) << 32) | low;
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

double box_muller(double first, double second) noexcept {
  // 1 - first lies in (0, 1], so that the logarithm is finite.
  return std::sqrt(-2 * std::log(1 - first)) * std::cos(2 * std::numbers::pi * second);
}

void check_fill(std::string_view operation, const NamedView& output) {
  check_strided_view(operation, output, output.view.rank());
  check_float(operation, output);
  check_no_self_overlap(operation, output);
}

/// Stores value_at(i) in element i of the view, in row-major order.
template <class ValueAt>
void fill(const TensorView& view, ValueAt value_at) {
  const std::int64_t count = view.num_elements();
  if (count == 0) return;
  const int last = view.rank() - 1;
  const std::int64_t row_size = last < 0 ? 1 : view.size(last);
  const std::int64_t row_stride = last < 0 ? 0 : view.stride(last);
  for (std::int64_t row_begin = 0; row_begin < count; row_begin += row_size) {
    std::int64_t offset = 0;
    std::int64_t index = row_begin / row_size;
    for (int dim = last - 1; dim >= 0; --dim) {
      offset += index % view.size(dim) * view.stride(dim);
      index /= view.size(dim);
    }
    for (std::int64_t i = 0; i < row_size; ++i) {
      store_element(view.data(), view.dtype(), offset + i * row_stride, value_at(row_begin + i));
    }
  }
}

}  // namespace

std::array<std::uint32_t, 4> philox(const std::array<std::uint32_t, 4>& counter,
                                    std::uint64_t key) noexcept {
  const PhiloxBlock block = philox_block({{counter[0], counter[1], counter[2], counter[3]}}, key);
  return {block.words[0], block.words[1], block.words[2], block.words[3]};
}

std::uint32_t Random::next_u32() noexcept {
  if (used_ == 4) {
    block_ = block_at(position_++, stream_, seed_);
    used_ = 0;
  }
  return block_[static_cast<std::size_t>(used_++)];
}

std::uint64_t Random::next_u64() noexcept {
  const std::uint64_t low = next_u32();
  return low | (static_cast<std::uint64_t>(next_u32()) << 32);
}

double Random::uniform() noexcept {
  const std::uint32_t low = next_u32();
  return to_unit(low, next_u32());
}

double Random::normal() noexcept {
  const double first = uniform();
  return box_muller(first, uniform());
}

std::int64_t Random::below(std::int64_t bound) noexcept {
  if (bound <= 1) return 0;
  // Draw as many bits as bound - 1 has until they fall below it: no bias, fewer than two draws on
  // average.
  const auto largest = static_cast<std::uint64_t>(bound - 1);
  const int unused_bits = std::countl_zero(largest);
  for (;;) {
    const std::uint64_t value = next_u64() >> unused_bits;
    if (value <= largest) return static_cast<std::int64_t>(value);
  }
}

void fill_uniform(const TensorView& view, double low, double high, std::uint64_t seed,
                  std::uint64_t stream) {
  check_fill("fill_uniform", {"view", view});
  check_finite("fill_uniform", "low", low);
  check_finite("fill_uniform", "high", high);
  if (high < low) {
    fail("fill_uniform", "high",
         "got " + std::to_string(high) + ", expected low = " + std::to_string(low) + " or more");
  }
  check_finite("fill_uniform", "high - low", high - low);
  fill(view, [=](std::int64_t i) {
    const auto words = block_at(static_cast<std::uint64_t>(i), stream, seed);
    return low + (high - low) * to_unit(words[0], words[1]);
  });
}

void fill_normal(const TensorView& view, double mean, double deviation, std::uint64_t seed,
                 std::uint64_t stream) {
  check_fill("fill_normal", {"view", view});
  check_finite("fill_normal", "mean", mean);
  check_finite("fill_normal", "deviation", deviation);
  if (deviation < 0) {
    fail("fill_normal", "deviation", "got " + std::to_string(deviation) + ", expected 0 or more");
  }
  fill(view, [=](std::int64_t i) {
    const auto words = block_at(static_cast<std::uint64_t>(i), stream, seed);
    return mean + deviation * box_muller(to_unit(words[0], words[1]), to_unit(words[2], words[3]));
  });
}

}  // namespace ladon
