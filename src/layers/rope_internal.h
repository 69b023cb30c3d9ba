// What the files of rope() share: its checks and its frequencies. Not arithmetic: the reference
// stands apart.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "ladon/rope.h"

namespace ladon::rope_internal {

/// How messages name the call and its tensors.
struct Names {
  std::string_view operation;
  std::string_view input;
  std::string_view output;
};

inline constexpr Names kForwardNames{"rope", "x", "out"};
inline constexpr Names kBackwardNames{"rope_backward", "dout", "dx"};

/// The sizes of a checked call.
struct Sizes {
  std::int64_t batch = 0;
  std::int64_t seq = 0;
  std::int64_t heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t rotary_dim = 0;  // resolved: never 0
  std::int64_t pairs() const noexcept { return rotary_dim / 2; }
  bool empty() const noexcept { return batch == 0 || seq == 0 || heads == 0; }
};

/// Throws Error unless the call is legal. `table` is null when angles come from the options.
Sizes check_call(const Names& names, const ConstTensorView& x, const RopeOptions& options,
                 const RopeTable* table, const RopePositions& positions, const TensorView& out);

/// Throws unless rotary_dim is even and positive.
void check_rotary_dim(std::string_view operation, std::string_view argument,
                      std::int64_t rotary_dim);

/// Throws unless base and the fields that the kind of scaling reads make sense, and every position
/// has finite angles.
void check_scaling(std::string_view operation, double base, const RopeScalingOptions& scaling);

/// Writes frequency(n) for every pair; rotary_dim is twice the size. check_scaling comes first.
void fill_frequencies(double base, const RopeScalingOptions& scaling,
                      std::span<double> frequencies) noexcept;

}  // namespace ladon::rope_internal
