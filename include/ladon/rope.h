// rope(): rotary position embedding, and its backward.
//
// Rotates pair n of the first rotary_dim elements of each head by position * frequency(n).
//   half-split   pairs (n, n + rotary_dim / 2)      Llama, Mistral, Qwen, GPT-NeoX
//   interleaved  pairs (2n, 2n + 1)                 GPT-J, DeepSeek
// as (a, b) -> (a cos - b sin, a sin + b cos). Elements past rotary_dim pass unchanged. Angles,
// sines and cosines are computed in double; the rotation itself in float for f32, f16 and bf16, in
// double for f64. A token's result depends on that token and its position alone.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "ladon/context.h"
#include "ladon/export.h"
#include "ladon/tensor_view.h"

namespace ladon {

enum class RopeLayout : std::uint8_t { kHalfSplit, kInterleaved };

/// How frequencies are stretched past the context a model was trained on.
enum class RopeScaling : std::uint8_t { kNone, kLinear, kLlama3, kYarn, kDynamic, kLongRope };

/// Fields that the kind does not name are not read.
struct RopeScalingOptions {
  RopeScaling kind = RopeScaling::kNone;
  double factor = 1;  // all but kNone: how much longer the context became; positive
  /// All but kNone and kLinear: the context before stretching.
  double original_context = 8192;
  /// kDynamic, kLongRope: the length of the longest sequence that will come. Their frequencies
  /// depend on it: up to original_context they are the plain ones (kDynamic) or those by
  /// short_factors (kLongRope). One length serves all tokens, so that a cached key never needs
  /// another rotation; positions past it are refused. 0: original_context.
  std::int64_t context = 0;
  /// kLongRope: divisors of the frequencies, one for each pair.
  std::vector<double> short_factors{};
  std::vector<double> long_factors{};
  /// kLlama3: wavelengths above original_context / low_frequency_factor are stretched, those below
  /// original_context / high_frequency_factor are kept, those between are blended.
  double low_frequency_factor = 1;
  double high_frequency_factor = 4;
  /// kYarn: frequencies that rotate more than beta_fast times over the original context are kept,
  /// those that rotate less than beta_slow times are stretched, those between are blended, linearly
  /// in the pair's index. Needs a base above 1.
  double beta_fast = 32;
  double beta_slow = 1;
  /// kYarn: round the two ends of the blend outwards to whole pairs (most models do).
  bool truncate = true;
  /// kYarn, kLongRope: factor of the cosines and sines. Empty, kYarn: yarn_mscale(factor, 1), or
  /// where mscale and mscale_all_dim are both set (not 0), yarn_mscale(factor, mscale) /
  /// yarn_mscale(factor, mscale_all_dim). Empty, kLongRope: sqrt(1 + ln(factor) /
  /// ln(original_context)), or 1 where factor <= 1.
  std::optional<double> attention_factor{};
  double mscale = 0;
  double mscale_all_dim = 0;

  bool operator==(const RopeScalingOptions&) const = default;
};

/// YaRN's magnitude correction: 0.1 * mscale * ln(factor) + 1, or 1 where factor <= 1.
LADON_API double yarn_mscale(double factor, double mscale) noexcept;

struct RopeOptions {
  RopeLayout layout = RopeLayout::kHalfSplit;
  /// How many leading elements of a head are rotated; even. 0: all of them.
  std::int64_t rotary_dim = 0;
  double base = 10000;
  RopeScalingOptions scaling{};
  /// The frequency of each of the rotary_dim / 2 pairs, in radians per position, instead of base
  /// and scaling, which must then be left at their defaults. Any finite numbers in any order,
  /// repeated or 0 (a pair that does not rotate). Empty: by base and scaling.
  std::vector<double> frequencies{};
  /// With explicit frequencies: factor of the cosines and sines; positive. Without, it must be 1,
  /// because scaling has its own.
  double magnitude = 1;
};

/// frequency(n) for each of the rotary_dim / 2 pairs, scaling applied: base^(-2n / rotary_dim) when
/// there is none.
LADON_API std::vector<double> rope_frequencies(std::int64_t rotary_dim, double base,
                                               const RopeScalingOptions& scaling);
/// Those of the options over heads of head_dim: the explicit ones, or by base and scaling.
LADON_API std::vector<double> rope_frequencies(const RopeOptions& options, std::int64_t head_dim);
/// Factor of the cosines and sines: 1 but for kYarn and kLongRope.
LADON_API double rope_magnitude(const RopeScalingOptions& scaling);
/// The same for all options: with explicit frequencies their magnitude.
LADON_API double rope_magnitude(const RopeOptions& options);

/// Which position each token has: an explicit list, or first, first + 1, ...
struct RopePositions {
  std::int64_t first = 0;  // may be negative; must be 0 with an explicit list
  /// Empty, or seq positions for every sequence, or batch * seq positions row by row. May be
  /// negative.
  std::span<const std::int64_t> explicit_positions{};
};

/// Rotates x [batch, seq, heads, head_dim] into out (same shape and dtype). Any strides, but the
/// innermost must be 1. out may be x itself (the same memory, shape and strides) and must share no
/// memory with x or a table in any other way. batch, seq and heads may be 0. Throws Error, and then
/// out is untouched.
LADON_API void rope(const Context& context, const ConstTensorView& x, const RopeOptions& options,
                    const RopePositions& positions, const TensorView& out);

/// Given the gradient of rope()'s output, writes the gradient of its input: the rotation back (and
/// the magnitude once more, as a transpose does; it is not the inverse). dx may be dout itself.
LADON_API void rope_backward(const Context& context, const ConstTensorView& dout,
                             const RopeOptions& options, const RopePositions& positions,
                             const TensorView& dx);

/// Precomputed sines and cosines, any float dtype and any strides. Both are [max_position,
/// rotary_dim / 2], looked up by position, which must then be in [0, max_position); or [batch, seq,
/// rotary_dim / 2], one row a token, and then positions must be left at their default.
struct RopeTable {
  ConstTensorView cos{};
  ConstTensorView sin{};
};

/// The same with given tables; only `layout` and `rotary_dim` of the options are read, and base,
/// scaling, frequencies and magnitude must be left at their defaults.
LADON_API void rope(const Context& context, const ConstTensorView& x, const RopeOptions& options,
                    const RopeTable& table, const RopePositions& positions, const TensorView& out);
LADON_API void rope_backward(const Context& context, const ConstTensorView& dout,
                             const RopeOptions& options, const RopeTable& table,
                             const RopePositions& positions, const TensorView& dx);

/// Fills table views [max_position, rotary_dim / 2] for positions 0, 1, ... with the cosines and
/// sines of the options, magnitude included. options.rotary_dim must be 0 or rotary_dim; the layout
/// is not read, since both layouts share a table.
LADON_API void make_rope_table(const Context& context, const RopeOptions& options,
                               std::int64_t rotary_dim, const TensorView& cos,
                               const TensorView& sin);

}  // namespace ladon
