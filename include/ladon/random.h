// Counter-based random numbers: Philox 4x32-10.
//
// A number depends on (seed, counter) alone, so any part of a stream can be made anywhere, in any
// order, by any thread. Dropout and weight initialisation both stand on this.
//
// Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#pragma once

#include <array>
#include <cstdint>

#include "ladon/context.h"
#include "ladon/export.h"
#include "ladon/tensor_view.h"

namespace ladon {

/// Four random words for a 128-bit counter under a 64-bit key.
LADON_API std::array<std::uint32_t, 4> philox(const std::array<std::uint32_t, 4>& counter,
                                              std::uint64_t key) noexcept;

/// A stream of numbers. `stream` separates independent uses of one seed.
class LADON_API Random {
 public:
  explicit Random(std::uint64_t seed, std::uint64_t stream = 0) noexcept
      : seed_(seed), stream_(stream) {}

  std::uint32_t next_u32() noexcept;
  std::uint64_t next_u64() noexcept;
  /// Uniform in [0, 1), 53 bits.
  double uniform() noexcept;
  double uniform(double low, double high) noexcept { return low + (high - low) * uniform(); }
  /// Standard normal (Box-Muller).
  double normal() noexcept;
  /// Uniform in [0, bound); bound must be positive.
  std::int64_t below(std::int64_t bound) noexcept;

 private:
  std::uint64_t seed_;
  std::uint64_t stream_;
  std::uint64_t position_ = 0;
  int used_ = 4;
  std::array<std::uint32_t, 4> block_{};
};

/// Fills a floating-point view. Element i, in row-major order, depends on (seed, stream, i) alone.
/// A Random of the same seed and stream draws the same words: give it another stream.
LADON_API void fill_uniform(const Context& context, const TensorView& view, double low, double high,
                            std::uint64_t seed, std::uint64_t stream = 0);
LADON_API void fill_normal(const Context& context, const TensorView& view, double mean,
                           double deviation, std::uint64_t seed, std::uint64_t stream = 0);

}  // namespace ladon
