// Philox 4x32-10 itself. In an unnamed namespace, because kernels compiled for newer CPUs include
// it too and their copies must not be shared.
#pragma once

#include <cstdint>

namespace ladon {
namespace {

struct PhiloxBlock {
  std::uint32_t words[4];
};

/// Ten rounds over a 128-bit counter. Constants from the paper named in ladon/random.h.
[[maybe_unused]] constexpr PhiloxBlock philox_block(PhiloxBlock counter,
                                                    std::uint64_t key) noexcept {
  std::uint32_t key_low = static_cast<std::uint32_t>(key);
  std::uint32_t key_high = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product0 = std::uint64_t{0xD2511F53U} * counter.words[0];
    const std::uint64_t product1 = std::uint64_t{0xCD9E8D57U} * counter.words[2];
    counter = {{static_cast<std::uint32_t>(product1 >> 32) ^ counter.words[1] ^ key_low,
                static_cast<std::uint32_t>(product1),
                static_cast<std::uint32_t>(product0 >> 32) ^ counter.words[3] ^ key_high,
                static_cast<std::uint32_t>(product0)}};
    key_low += 0x9E3779B9U;
    key_high += 0xBB67AE85U;
  }
  return counter;
}

/// The random word of one attention weight: keys four to a block. Backward, and any split of the
/// work, finds the same word again.
[[maybe_unused]] constexpr PhiloxBlock dropout_block(std::uint64_t seed, std::int64_t sequence,
                                                     std::int64_t head, std::int64_t query,
                                                     std::int64_t key) noexcept {
  // A counter has 32 bits for each; sequences may be numbered beyond that.
  const std::uint64_t beyond = static_cast<std::uint64_t>(sequence) >> 32;
  return philox_block({{static_cast<std::uint32_t>(key / 4), static_cast<std::uint32_t>(query),
                        static_cast<std::uint32_t>(head), static_cast<std::uint32_t>(sequence)}},
                      seed ^ (beyond * 0x9E3779B97F4A7C15U));
}

}  // namespace
}  // namespace ladon
