// What the files of rope() and the layers share: its checks, its frequencies, and the rotation of
// tensors that have been checked.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <string_view>
#include <vector>

#include "core/checks.h"
#include "core/rope_params.h"
#include "ladon/rope.h"

namespace ladon::rope_internal {

/// How messages name the call and its tensors.
struct Names {
  Operation operation;
  std::string_view input;
  std::string_view output;
};

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

/// Throws unless the positions fit a call of this size. Messages call them `argument`.
void check_positions(std::string_view operation, std::string_view argument,
                     const RopePositions& positions, std::int64_t batch, std::int64_t seq);

/// Throws unless rotary_dim is even and positive.
void check_rotary_dim(std::string_view operation, std::string_view argument,
                      std::int64_t rotary_dim);

/// Throws unless the options' frequencies make sense for this rotary_dim, and every position has
/// finite angles.
void check_frequencies(std::string_view operation, const RopeOptions& options,
                       std::int64_t rotary_dim);

/// Positions from 0 on that the frequencies are meant for.
std::int64_t position_limit(const RopeOptions& options) noexcept;

/// Throws where one of the positions of `seq` tokens has reached the limit.
void check_position_limit(std::string_view operation, const RopePositions& positions,
                          std::int64_t seq, std::int64_t limit);

/// Writes frequency(n) by base and scaling for every pair; rotary_dim is twice the size. They must
/// have been checked.
void fill_frequencies(double base, const RopeScalingOptions& scaling,
                      std::span<double> frequencies) noexcept;

/// A layer's rope, worked out when the layer is made.
struct RopePlan {
  RopeLayout layout = RopeLayout::kHalfSplit;
  std::vector<double> frequencies{};  // of the rotary_dim / 2 pairs
  double magnitude = 1;
  std::int64_t position_limit = std::numeric_limits<std::int64_t>::max();

  RopePlan() = default;
  /// Checked options over heads of head_dim.
  RopePlan(const RopeOptions& options, std::int64_t head_dim);
};

/// rope() or rope_backward() of checked x [batch, seq, heads, head_dim], in place.
void rotate_in_place(const Context& context, const TensorView& x, const RopePlan& plan,
                     const RopePositions& positions, bool backward = false);

/// The same of queries and keys.
struct PositionedHeads {
  const TensorView& x;
  const RopePositions& positions;
};
void rotate_in_place(const Context& context, const PositionedHeads& queries,
                     const PositionedHeads& keys, const RopePlan& plan, bool backward = false);
/// rope() of queries and keys for KvAppend to do, with lists that must stay until then.
std::array<RopeParams, 2> rotations_of(const PositionedHeads& queries, const PositionedHeads& keys,
                                       const RopePlan& plan);

}  // namespace ladon::rope_internal
