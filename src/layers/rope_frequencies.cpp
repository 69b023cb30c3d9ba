// The frequencies of rope(), and how they are stretched to contexts longer than a model was trained
// on. Definitions:
//   kLinear   Chen et al., "Extending context window of LLMs via positional interpolation", 2023
//   kLlama3   Meta's Llama 3.1 reference code
//   kYarn     Peng et al., "YaRN: efficient context window extension of LLMs", 2023, with the
//             rounding of the blend's ends that its code and Hugging Face's share
//   kDynamic  the base stretched by the length of the sequence ("NTK-aware"), as in Hugging Face's
//             code
//   kLongRope Ding et al., "LongRoPE: extending LLM context window beyond 2 million tokens", 2024
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <exception>
#include <limits>
#include <numbers>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/checks.h"
#include "core/fail.h"
#include "ladon/rope.h"
#include "layers/rope_internal.h"

namespace ladon {
namespace {

constexpr double kTwoPi = 2 * std::numbers::pi;

void check_positive(std::string_view operation, std::string_view argument, double value) {
  if (std::isfinite(value) && value > 0) return;
  fail(operation, argument, "got " + text_of(value) + ", expected a positive finite number");
}

void check_not_negative(std::string_view operation, std::string_view argument, double value) {
  if (std::isfinite(value) && value >= 0) return;
  fail(operation, argument, "got " + text_of(value) + ", expected 0 or a positive finite number");
}

/// The sequence length that dynamic and longrope frequencies are for.
double context_of(const RopeScalingOptions& scaling) {
  return scaling.context == 0 ? scaling.original_context : static_cast<double>(scaling.context);
}

std::span<const double> factors_of(const RopeScalingOptions& scaling) {
  return context_of(scaling) > scaling.original_context ? scaling.long_factors
                                                        : scaling.short_factors;
}

double magnitude_of(const RopeScalingOptions& scaling) {
  if (scaling.kind != RopeScaling::kYarn && scaling.kind != RopeScaling::kLongRope) return 1;
  if (scaling.attention_factor) return *scaling.attention_factor;
  if (scaling.kind == RopeScaling::kLongRope) {
    return scaling.factor <= 1
               ? 1
               : std::sqrt(1 + std::log(scaling.factor) / std::log(scaling.original_context));
  }
  if (scaling.mscale != 0 && scaling.mscale_all_dim != 0) {
    return yarn_mscale(scaling.factor, scaling.mscale) /
           yarn_mscale(scaling.factor, scaling.mscale_all_dim);
  }
  return yarn_mscale(scaling.factor, 1);
}

void check_magnitude(std::string_view operation, const RopeScalingOptions& scaling) {
  if (scaling.attention_factor) {
    check_positive(operation, "scaling.attention_factor", *scaling.attention_factor);
  }
  check_not_negative(operation, "scaling.mscale", scaling.mscale);
  check_not_negative(operation, "scaling.mscale_all_dim", scaling.mscale_all_dim);
  const double magnitude = magnitude_of(scaling);
  if (!std::isfinite(magnitude)) {
    fail(operation, "scaling.mscale",
         "got " + text_of(scaling.mscale) + ", which gives the magnitude " + text_of(magnitude) +
             ", expected a finite one");
  }
}

/// What both kinds need whose frequencies depend on the length.
void check_contexts(std::string_view operation, const RopeScalingOptions& scaling) {
  check_positive(operation, "scaling.factor", scaling.factor);
  if (!(std::isfinite(scaling.original_context) && scaling.original_context > 1)) {
    fail(operation, "scaling.original_context",
         "got " + text_of(scaling.original_context) + ", expected a finite number above 1");
  }
  if (scaling.context < 0) {
    fail(operation, "scaling.context",
         "got " + std::to_string(scaling.context) + ", expected 0 or a number of tokens");
  }
}

/// What can be checked without the base and the rotary dimensions.
void check_scaling_fields(std::string_view operation, const RopeScalingOptions& scaling) {
  switch (scaling.kind) {
    case RopeScaling::kNone: return;
    case RopeScaling::kLinear: check_positive(operation, "scaling.factor", scaling.factor); return;
    case RopeScaling::kLlama3:
      check_positive(operation, "scaling.factor", scaling.factor);
      check_positive(operation, "scaling.original_context", scaling.original_context);
      check_positive(operation, "scaling.low_frequency_factor", scaling.low_frequency_factor);
      check_positive(operation, "scaling.high_frequency_factor", scaling.high_frequency_factor);
      if (scaling.high_frequency_factor <= scaling.low_frequency_factor) {
        fail(operation, "scaling.high_frequency_factor",
             "got " + text_of(scaling.high_frequency_factor) +
                 ", expected more than low_frequency_factor, which is " +
                 text_of(scaling.low_frequency_factor));
      }
      return;
    case RopeScaling::kYarn:
      check_positive(operation, "scaling.factor", scaling.factor);
      check_positive(operation, "scaling.original_context", scaling.original_context);
      check_positive(operation, "scaling.beta_fast", scaling.beta_fast);
      check_positive(operation, "scaling.beta_slow", scaling.beta_slow);
      if (scaling.beta_fast < scaling.beta_slow) {
        fail(operation, "scaling.beta_fast",
             "got " + text_of(scaling.beta_fast) + ", expected at least beta_slow, which is " +
                 text_of(scaling.beta_slow));
      }
      check_magnitude(operation, scaling);
      return;
    case RopeScaling::kDynamic:
      check_contexts(operation, scaling);
      // The base grows by factor * context / original - (factor - 1), which must be positive.
      if (scaling.factor < 1) {
        fail(operation, "scaling.factor",
             "got " + text_of(scaling.factor) + ", expected 1 or more for dynamic scaling");
      }
      return;
    case RopeScaling::kLongRope:
      check_contexts(operation, scaling);
      check_magnitude(operation, scaling);
      for (const double factor : scaling.short_factors) {
        check_positive(operation, "scaling.short_factors", factor);
      }
      for (const double factor : scaling.long_factors) {
        check_positive(operation, "scaling.long_factors", factor);
      }
      return;
  }
  fail(operation, "scaling.kind",
       "got " + std::to_string(static_cast<int>(scaling.kind)) + ", expected a RopeScaling");
}

/// The base whose slowest pair, over this length, rotates about as often as before.
double dynamic_base(double base, double rotary_dim, const RopeScalingOptions& scaling) {
  const double context = std::max(context_of(scaling), scaling.original_context);
  const double stretch = scaling.factor * context / scaling.original_context - (scaling.factor - 1);
  return stretch == 1 ? base : base * std::pow(stretch, rotary_dim / (rotary_dim - 2));
}

double llama3_frequency(double frequency, const RopeScalingOptions& scaling) {
  const double wavelength = kTwoPi / frequency;
  const double longest_kept = scaling.original_context / scaling.high_frequency_factor;
  const double shortest_stretched = scaling.original_context / scaling.low_frequency_factor;
  if (wavelength < longest_kept) return frequency;
  if (wavelength > shortest_stretched) return frequency / scaling.factor;
  const double kept = (scaling.original_context / wavelength - scaling.low_frequency_factor) /
                      (scaling.high_frequency_factor - scaling.low_frequency_factor);
  return (1 - kept) * (frequency / scaling.factor) + kept * frequency;
}

/// YaRN's blend: pairs up to `low` are kept, pairs from `high` on are stretched.
struct YarnRamp {
  double low;
  double high;
};

YarnRamp yarn_ramp(double rotary_dim, double base, const RopeScalingOptions& scaling) {
  // The pair, as a real number, that rotates `rotations` times over the original context:
  // original * base^(-2n / rotary_dim) / (2 pi) = rotations, solved for n.
  const auto pair_with = [&](double rotations) {
    return rotary_dim * std::log(scaling.original_context / (kTwoPi * rotations)) /
           (2 * std::log(base));
  };
  YarnRamp ramp{pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)};
  if (scaling.truncate) ramp = {std::floor(ramp.low), std::ceil(ramp.high)};
  // Published code bounds `low` from below and `high` from above only. Where the whole blend is
  // outside (a tiny or a huge original context) its ramp then runs backwards; bounding both ends on
  // both sides keeps the meaning and changes nothing else.
  const double last = rotary_dim - 1;
  ramp = {std::clamp(ramp.low, 0.0, last), std::clamp(ramp.high, 0.0, last)};
  if (ramp.low == ramp.high) ramp.high += 0.001;  // a step; the width is the published code's
  return ramp;
}

// No position exceeds 2^63.
constexpr double kLargestFrequency = std::numeric_limits<double>::max() * 0x1p-63;

/// Throws unless base and the fields that the kind of scaling reads make sense, and every position
/// has finite angles.
void check_factors(std::string_view operation, std::string_view name,
                   const std::vector<double>& factors, std::int64_t rotary_dim) {
  if (std::cmp_equal(factors.size(), rotary_dim / 2)) return;
  fail(operation, name,
       "got " + std::to_string(factors.size()) + " of them, expected one for each of " +
           std::to_string(rotary_dim / 2) + " pairs");
}

void check_scaling(std::string_view operation, double base, std::int64_t rotary_dim,
                   const RopeScalingOptions& scaling) {
  check_positive(operation, "base", base);
  check_scaling_fields(operation, scaling);
  if (scaling.kind == RopeScaling::kYarn && base <= 1) {
    fail(operation, "base", "got " + text_of(base) + ", expected more than 1 for YaRN scaling");
  }
  double divisor = scaling.kind == RopeScaling::kNone ? 1 : scaling.factor;
  if (scaling.kind == RopeScaling::kDynamic) {
    if (rotary_dim <= 2 && context_of(scaling) > scaling.original_context) {
      fail(operation, "rotary_dim",
           "got " + std::to_string(rotary_dim) + ", expected more than 2 for dynamic scaling");
    }
    divisor = 1;
  }
  if (scaling.kind == RopeScaling::kLongRope) {
    check_factors(operation, "scaling.short_factors", scaling.short_factors, rotary_dim);
    check_factors(operation, "scaling.long_factors", scaling.long_factors, rotary_dim);
    divisor = *std::min_element(factors_of(scaling).begin(), factors_of(scaling).end());
  }
  // No frequency exceeds this, whatever the kind and the pair.
  const double largest_frequency = std::max(1.0, 1 / base) * std::max(1.0, 1 / divisor);
  if (largest_frequency > kLargestFrequency) {
    fail(operation, "base",
         "got " + text_of(base) + " with scaling.factor " + text_of(divisor) +
             ", expected angles that are finite");
  }
}

void check_explicit(std::string_view operation, const RopeOptions& options,
                    std::int64_t rotary_dim) {
  // A base or a scaling in addition to frequencies would silently have no effect.
  if (options.base != RopeOptions{}.base) {
    fail(operation, "base", "got a base together with explicit frequencies, expected the default");
  }
  if (!(options.scaling == RopeScalingOptions{})) {
    fail(operation, "scaling",
         "got a scaling together with explicit frequencies, expected the default");
  }
  if (std::cmp_not_equal(options.frequencies.size(), rotary_dim / 2)) {
    fail(operation, "frequencies",
         "got " + std::to_string(options.frequencies.size()) + " of them, expected " +
             std::to_string(rotary_dim / 2) + ", one for each pair of rotary_dim " +
             std::to_string(rotary_dim));
  }
  for (std::size_t n = 0; n < options.frequencies.size(); ++n) {
    // Written so that NaN fails.
    if (std::abs(options.frequencies[n]) <= kLargestFrequency) continue;
    fail(operation, "frequencies",
         "got " + text_of(options.frequencies[n]) + " at index " + std::to_string(n) +
             ", expected finite numbers whose angles are finite");
  }
  check_positive(operation, "magnitude", options.magnitude);
}

}  // namespace

namespace rope_internal {

void check_rotary_dim(std::string_view operation, std::string_view argument,
                      std::int64_t rotary_dim) {
  if (rotary_dim > 0 && rotary_dim % 2 == 0) return;
  fail(operation, argument,
       "got " + std::to_string(rotary_dim) + ", expected a positive even number");
}

void check_frequencies(std::string_view operation, const RopeOptions& options,
                       std::int64_t rotary_dim) {
  if (!options.frequencies.empty()) return check_explicit(operation, options, rotary_dim);
  check_scaling(operation, options.base, rotary_dim, options.scaling);
  if (options.magnitude != 1) {
    fail(operation, "magnitude",
         "got " + text_of(options.magnitude) + " without explicit frequencies, expected 1");
  }
}

void fill_frequencies(double base, const RopeScalingOptions& scaling,
                      std::span<double> frequencies) noexcept {
  const double rotary_dim = 2 * static_cast<double>(frequencies.size());
  const YarnRamp ramp =
      scaling.kind == RopeScaling::kYarn ? yarn_ramp(rotary_dim, base, scaling) : YarnRamp{0, 1};
  if (scaling.kind == RopeScaling::kDynamic) base = dynamic_base(base, rotary_dim, scaling);
  for (std::size_t n = 0; n < frequencies.size(); ++n) {
    const double pair = static_cast<double>(n);
    const double plain = std::pow(base, -2 * pair / rotary_dim);
    double frequency = plain;
    switch (scaling.kind) {
      case RopeScaling::kNone:
      case RopeScaling::kDynamic: break;
      case RopeScaling::kLongRope: frequency = plain / factors_of(scaling)[n]; break;
      case RopeScaling::kLinear: frequency = plain / scaling.factor; break;
      case RopeScaling::kLlama3: frequency = llama3_frequency(plain, scaling); break;
      case RopeScaling::kYarn: {
        const double stretched = std::clamp((pair - ramp.low) / (ramp.high - ramp.low), 0.0, 1.0);
        frequency = stretched * (plain / scaling.factor) + (1 - stretched) * plain;
        break;
      }
    }
    frequencies[n] = frequency;
  }
}

std::int64_t position_limit(const RopeOptions& options) noexcept {
  const RopeScalingOptions& scaling = options.scaling;
  if (scaling.kind != RopeScaling::kDynamic && scaling.kind != RopeScaling::kLongRope) {
    return std::numeric_limits<std::int64_t>::max();
  }
  const double context = std::max(context_of(scaling), scaling.original_context);
  return context < 0x1p62 ? static_cast<std::int64_t>(context) : std::int64_t{1} << 62;
}

}  // namespace rope_internal

double yarn_mscale(double factor, double mscale) noexcept {
  return factor <= 1 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

std::vector<double> rope_frequencies(std::int64_t rotary_dim, double base,
                                     const RopeScalingOptions& scaling) {
  constexpr std::string_view kOperation = "rope_frequencies";
  rope_internal::check_rotary_dim(kOperation, "rotary_dim", rotary_dim);
  check_scaling(kOperation, base, rotary_dim, scaling);
  std::vector<double> frequencies;
  try {
    frequencies.resize(static_cast<std::size_t>(rotary_dim / 2));
  } catch (const std::exception&) {  // bad_alloc or length_error
    fail(ErrorCode::kOutOfMemory, kOperation, "rotary_dim",
         "got " + std::to_string(rotary_dim) + ", expected a size that fits the memory");
  }
  rope_internal::fill_frequencies(base, scaling, frequencies);
  return frequencies;
}

std::vector<double> rope_frequencies(const RopeOptions& options, std::int64_t head_dim) {
  const std::int64_t rotary_dim = options.rotary_dim == 0 ? head_dim : options.rotary_dim;
  if (options.frequencies.empty() && options.magnitude == 1) {
    return rope_frequencies(rotary_dim, options.base, options.scaling);
  }
  constexpr std::string_view kOperation = "rope_frequencies";
  rope_internal::check_rotary_dim(kOperation, "rotary_dim", rotary_dim);
  rope_internal::check_frequencies(kOperation, options, rotary_dim);
  return options.frequencies;
}

double rope_magnitude(const RopeOptions& options) {
  return options.frequencies.empty() ? rope_magnitude(options.scaling) : options.magnitude;
}

double rope_magnitude(const RopeScalingOptions& scaling) {
  check_scaling_fields("rope_magnitude", scaling);
  return magnitude_of(scaling);
}

}  // namespace ladon
