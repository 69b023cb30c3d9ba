// How cost goes with shape: exponents of time over length, and neighbours of the round sizes.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cases.h"
#include "session.h"

namespace ladon::bench {

/// One shape at several lengths.
struct Series {
  Isa isa = Isa::kBaseline;
  Shape shape{};
  std::vector<std::int64_t> lengths{};
  double expected = 0;  // the exponent

  /// "exponent avx512 f32 forward B1 H8 D128 full".
  std::string name() const;
};

/// Prefill over its length, decoding over its keys. Fewer and shorter lengths where it is to be
/// quick.
std::vector<Series> list_series(Isa isa, bool quick);
/// All lengths in the same rounds; adds the exponent that fits their times best.
void fit_exponent(Session& session, const Series& series);

/// A shape that a table might be tuned to, and some close to it that it is not.
struct Neighbourhood {
  Case center{};
  std::vector<Case> others{};

  /// "neighbours of avx512 f32 forward B1 H8 S2048 D128 full".
  std::string name() const { return "neighbours of " + center.full_name(); }
};

/// Fewer of them where it is to be quick.
std::vector<Neighbourhood> list_neighbourhoods(Isa isa, bool quick);
/// All of them in the same rounds; adds each neighbour's share over the center's.
void compare_neighbours(Session& session, const Neighbourhood& neighbourhood);

/// The slope of log(y) over log(x) by least squares.
double fitted_exponent(std::span<const double> x, std::span<const double> y);

}  // namespace ladon::bench
