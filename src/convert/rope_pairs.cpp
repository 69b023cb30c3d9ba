#include "convert/rope_pairs.h"

#include <cmath>

namespace ladon::convert {

HeadLayout::HeadLayout(const std::optional<RopeOptions>& rope, std::int64_t dim) : head_dim(dim) {
  if (!rope) return;
  frequencies = rope_frequencies(*rope, head_dim);
  magnitude = rope_magnitude(*rope);
  const auto count = static_cast<std::int64_t>(frequencies.size());
  first_unrotated = 2 * count;
  for (std::int64_t n = 0; n < count; ++n) {
    pairs.push_back(rope->layout == RopeLayout::kInterleaved ? Pair{2 * n, 2 * n + 1}
                                                             : Pair{n, n + count});
  }
}

ComplexMatrix pair_moments(const RealMatrix& moments, const HeadLayout& layout, std::int64_t pair,
                           const std::vector<std::int64_t>& heads) {
  const auto count = static_cast<std::int64_t>(heads.size());
  const auto [a, b] = layout.pairs[static_cast<std::size_t>(pair)];
  ComplexMatrix result(count, count);
  for (std::int64_t j = 0; j < count; ++j) {
    const std::int64_t row = heads[static_cast<std::size_t>(j)] * layout.head_dim;
    for (std::int64_t k = 0; k < count; ++k) {
      const std::int64_t column = heads[static_cast<std::size_t>(k)] * layout.head_dim;
      result(j, k) = {moments(row + a, column + a) + moments(row + b, column + b),
                      moments(row + b, column + a) - moments(row + a, column + b)};
    }
  }
  return result;
}

void multiply_pair(ladon_eigen::Ref<RealMatrix> head, const HeadLayout::Pair& pair,
                   Complex factor) {
  const RealMatrix real = head.row(pair.a);
  const RealMatrix imaginary = head.row(pair.b);
  head.row(pair.a) = factor.real() * real - factor.imag() * imaginary;
  head.row(pair.b) = factor.imag() * real + factor.real() * imaginary;
}

Complex mean_phase(double frequency, std::int64_t positions, bool causal) {
  Complex sum = 0;
  double count = 0;
  for (std::int64_t distance = 0; distance < positions; ++distance) {
    const auto pairs = static_cast<double>(positions - distance);
    const double angle = frequency * static_cast<double>(distance);
    // Without a causal mask every distance occurs in both directions.
    const bool both = !causal && distance > 0;
    sum += pairs *
           (both ? Complex(2 * std::cos(angle), 0) : Complex(std::cos(angle), -std::sin(angle)));
    count += both ? 2 * pairs : pairs;
  }
  return sum / count;
}

}  // namespace ladon::convert
