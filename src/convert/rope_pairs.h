// Rope pairs as complex numbers: pair l of a head is (row a) + i (row b), and rope multiplies it by
// e^(i position frequency). Whatever multiplies a pair of the keys by a complex number, and the
// same pair of the queries by its conjugate's inverse, therefore commutes with rope.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "convert/eigen.h"
#include "ladon/rope.h"

namespace ladon::convert {

/// Which rows of a head are what.
struct HeadLayout {
  HeadLayout(const std::optional<RopeOptions>& rope, std::int64_t head_dim);

  struct Pair {
    std::int64_t a;
    std::int64_t b;
  };
  std::int64_t head_dim;
  std::vector<Pair> pairs{};          // rows within a head
  std::vector<double> frequencies{};  // one for each pair
  double magnitude = 1;               // that rope gives queries and keys
  std::int64_t first_unrotated = 0;   // rows from here on have no rope
  std::int64_t unrotated() const { return head_dim - first_unrotated; }
  std::int64_t num_pairs() const { return static_cast<std::int64_t>(pairs.size()); }
};

/// E[z_j conj(z_k)] of pair `pair` over the given heads, from moments of whole heads.
ComplexMatrix pair_moments(const RealMatrix& moments, const HeadLayout& layout, std::int64_t pair,
                           const std::vector<std::int64_t>& heads);

/// Multiplies the rows of one pair by a complex number: z <- factor * z.
void multiply_pair(ladon_eigen::Ref<RealMatrix> head, const HeadLayout::Pair& pair, Complex factor);

/// The mean of e^(-i frequency distance) over the pairs of positions of a sequence: causal ones, or
/// all.
Complex mean_phase(double frequency, std::int64_t positions, bool causal);

}  // namespace ladon::convert
