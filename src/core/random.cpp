#include "ladon/random.h"

#include <bit>
#include <string>

#include "core/checks.h"
#include "core/context_impl.h"
#include "core/fail.h"
#include "core/random_elements.h"

namespace ladon {
namespace {

void check_fill(const Operation& operation, const NamedView& output) {
  check_strided_view(operation, output, output.view.rank());
  check_float(operation, output);
  check_no_self_overlap(operation, output);
}

}  // namespace

std::array<std::uint32_t, 4> philox(const std::array<std::uint32_t, 4>& counter,
                                    std::uint64_t key) noexcept {
  const PhiloxBlock block = philox_block({{counter[0], counter[1], counter[2], counter[3]}}, key);
  return {block.words[0], block.words[1], block.words[2], block.words[3]};
}

std::uint32_t Random::next_u32() noexcept {
  if (used_ == 4) {
    const PhiloxBlock block = random_block(position_++, stream_, seed_);
    block_ = {block.words[0], block.words[1], block.words[2], block.words[3]};
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

void fill_uniform(const Context& context, const TensorView& view, double low, double high,
                  std::uint64_t seed, std::uint64_t stream) {
  const Operation operation("fill_uniform", context);
  check_fill(operation, {"view", view});
  check_finite(operation, "low", low);
  check_finite(operation, "high", high);
  if (high < low) {
    fail(operation, "high",
         "got " + std::to_string(high) + ", expected low = " + std::to_string(low) + " or more");
  }
  check_finite(operation, "high - low", high - low);
  backend_of(context).fill_random({.view = view,
                                   .kind = RandomFillParams::Kind::kUniform,
                                   .a = low,
                                   .b = high,
                                   .seed = seed,
                                   .stream = stream});
}

void fill_normal(const Context& context, const TensorView& view, double mean, double deviation,
                 std::uint64_t seed, std::uint64_t stream) {
  const Operation operation("fill_normal", context);
  check_fill(operation, {"view", view});
  check_finite(operation, "mean", mean);
  check_finite(operation, "deviation", deviation);
  if (deviation < 0) {
    fail(operation, "deviation", "got " + std::to_string(deviation) + ", expected 0 or more");
  }
  backend_of(context).fill_random({.view = view,
                                   .kind = RandomFillParams::Kind::kNormal,
                                   .a = mean,
                                   .b = deviation,
                                   .seed = seed,
                                   .stream = stream});
}

}  // namespace ladon
