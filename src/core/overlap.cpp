// Whether two strided views meet is a bounded Diophantine question: is there a choice of indices,
// each within its size, for which a sum of strides hits a given distance? NP-hard in general, but
// real layouts nest: each stride is at least as long as all the smaller ones together, and then the
// search below hardly branches.
#include "core/overlap.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <utility>

#include "core/integer.h"

namespace ladon {
namespace {

/// coefficient * n with n in [0, limit]; both positive.
struct Term {
  std::int64_t coefficient;
  std::int64_t limit;
};

/// Insertion sort: there are a handful (and GCC 12 warns falsely about std::sort on short arrays).
void sort_largest_first(std::span<Term> terms) noexcept {
  for (std::size_t i = 1; i < terms.size(); ++i) {
    for (std::size_t j = i; j > 0 && terms[j - 1].coefficient < terms[j].coefficient; --j) {
      std::swap(terms[j - 1], terms[j]);
    }
  }
}

/// Is there a sum of terms within [low, high]?
class SumSearch {
 public:
  void add(std::int64_t coefficient, std::int64_t limit) noexcept {
    if (coefficient != 0 && limit > 0) terms_[count_++] = {coefficient, limit};
  }

  /// True also when the budget runs out. Call once, after all add().
  bool reaches(std::int64_t low, std::int64_t high) noexcept {
    prepare();
    return search(0, low, high);
  }

 private:
  // Nodes of the search tree that are visited before giving up: about a millisecond. Nested layouts
  // of rank 8 take a few hundred.
  static constexpr int kBudget = 100000;
  static constexpr std::size_t kMaxTerms = 2 * static_cast<std::size_t>(kMaxRank);

  /// What the terms from one on can make.
  struct Tail {
    std::int64_t sum = 0;  // the largest
    std::int64_t gcd = 0;  // divides all of them
    bool complete = true;  // every multiple of gcd in [0, sum] can be made
  };

  void prepare() noexcept {
    sort_largest_first({terms_.data(), count_});
    // Terms of one coefficient are one term: two views of one buffer share all their strides.
    std::size_t merged = 0;
    for (std::size_t i = 0; i < count_; ++i) {
      if (merged != 0 && terms_[merged - 1].coefficient == terms_[i].coefficient) {
        terms_[merged - 1].limit += terms_[i].limit;
      } else {
        terms_[merged++] = terms_[i];
      }
    }
    count_ = merged;
    tails_[count_] = {};
    for (std::size_t i = count_; i-- > 0;) {
      const Term& term = terms_[i];
      const Tail& rest = tails_[i + 1];
      tails_[i].sum = term.coefficient * term.limit + rest.sum;
      tails_[i].gcd = std::gcd(term.coefficient, rest.gcd);
      // Copies of the rest, one coefficient apart, leave no gap if each reaches the next one.
      const bool first = rest.gcd == 0;
      tails_[i].complete = first || (rest.complete && term.coefficient % rest.gcd == 0 &&
                                     term.coefficient <= rest.sum + rest.gcd);
    }
  }

  bool search(std::size_t index, std::int64_t low, std::int64_t high) noexcept {
    if (--budget_ < 0) return true;
    const Tail& tail = tails_[index];
    low = std::max<std::int64_t>(low, 0);
    high = std::min(high, tail.sum);
    if (low > high) return false;
    if (tail.gcd == 0) return true;                      // no terms left, and 0 is in [low, high]
    if (high / tail.gcd * tail.gcd < low) return false;  // no multiple of the gcd in between
    if (tail.complete) return true;
    const Term& term = terms_[index];
    const std::int64_t rest = tails_[index + 1].sum;
    const std::int64_t last = std::min(term.limit, high / term.coefficient);
    // The rest must be able to make up what is missing to low.
    const std::int64_t first = low > rest ? ceil_div(low - rest, term.coefficient) : 0;
    for (std::int64_t n = first; n <= last; ++n) {
      const std::int64_t taken = n * term.coefficient;
      if (search(index + 1, low - taken, high - taken)) return true;
    }
    return false;
  }

  std::array<Term, kMaxTerms> terms_{};
  std::array<Tail, kMaxTerms + 1> tails_{};
  std::size_t count_ = 0;
  int budget_ = kBudget;
};

/// A view's lowest byte, and the way from there to its last element's first byte.
struct ByteRange {
  std::uintptr_t low;
  std::int64_t reach;
};

std::int64_t absolute(std::int64_t value) noexcept { return value < 0 ? -value : value; }

ByteRange byte_range(const ConstTensorView& view) noexcept {
  const auto element = static_cast<std::int64_t>(size_of(view.dtype()));
  ByteRange range{reinterpret_cast<std::uintptr_t>(view.data()), 0};
  for (int dim = 0; dim < view.rank(); ++dim) {
    if (view.size(dim) == 1) continue;  // its stride is not used and may be anything
    const std::int64_t reach = (view.size(dim) - 1) * absolute(view.stride(dim)) * element;
    if (view.stride(dim) < 0) range.low -= static_cast<std::uintptr_t>(reach);
    range.reach += reach;
  }
  return range;
}

void add_dimensions(const ConstTensorView& view, SumSearch& search) noexcept {
  const auto element = static_cast<std::int64_t>(size_of(view.dtype()));
  for (int dim = 0; dim < view.rank(); ++dim) {
    if (view.size(dim) == 1) continue;
    search.add(absolute(view.stride(dim)) * element, view.size(dim) - 1);
  }
}

}  // namespace

bool overlaps(const ConstTensorView& a, const ConstTensorView& b) {
  if (a.absent() || b.absent() || a.device() != b.device()) return false;
  if (a.num_elements() == 0 || b.num_elements() == 0) return false;
  const ByteRange range_a = byte_range(a);
  const ByteRange range_b = byte_range(b);
  const auto size_a = static_cast<std::int64_t>(size_of(a.dtype()));
  const auto size_b = static_cast<std::int64_t>(size_of(b.dtype()));
  // Apart as a whole: the common case, and with it out of the way the distance cannot overflow.
  if (range_a.low < range_b.low) {
    if (range_b.low - range_a.low >= static_cast<std::uintptr_t>(range_a.reach + size_a)) {
      return false;
    }
  } else if (range_a.low - range_b.low >= static_cast<std::uintptr_t>(range_b.reach + size_b)) {
    return false;
  }
  // Offsets i of a and j of b from their lowest bytes must satisfy
  //   low_a + i + x = low_b + j + y   for bytes x < size_a and y < size_b of an element.
  // Counting b's offsets from its other end, j = reach_b - j', makes every sign positive:
  //   i + j' = (low_b - low_a) + reach_b + y - x.
  SumSearch search;
  add_dimensions(a, search);
  add_dimensions(b, search);
  const std::int64_t distance = static_cast<std::int64_t>(range_b.low - range_a.low);
  const std::int64_t target = distance + range_b.reach;
  return search.reaches(target - (size_a - 1), target + (size_b - 1));
}

bool overlaps_itself(const ConstTensorView& view) {
  if (view.num_elements() <= 1) return false;
  std::array<Term, kMaxRank> dims{};
  std::size_t count = 0;
  for (int dim = 0; dim < view.rank(); ++dim) {
    if (view.size(dim) == 1) continue;
    if (view.stride(dim) == 0) return true;
    dims[count++] = {absolute(view.stride(dim)), view.size(dim) - 1};
  }
  sort_largest_first({dims.data(), count});
  // Two indices meet when their difference d, not all zero, has sum(d * stride) = 0. Let the first
  // difference that is not zero be number k; it may be taken as positive, 1 + f. The others are in
  // [-limit, limit]; as e = d + limit they are not negative, and the question is again a sum:
  //   f * stride_k + sum(e * stride) = sum(limit * stride) - stride_k   over those after k.
  for (std::size_t k = 0; k < count; ++k) {
    SumSearch search;
    search.add(dims[k].coefficient, dims[k].limit - 1);
    std::int64_t target = -dims[k].coefficient;
    for (std::size_t after = k + 1; after < count; ++after) {
      search.add(dims[after].coefficient, 2 * dims[after].limit);
      target += dims[after].coefficient * dims[after].limit;
    }
    if (search.reaches(target, target)) return true;
  }
  return false;
}

}  // namespace ladon
