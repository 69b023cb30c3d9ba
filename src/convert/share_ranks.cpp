// Unequal ranks: spectra fall, so taking the largest component that is left, again and again, is
// optimal.
#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>

#include "core/fail.h"
#include "ladon/convert.h"

namespace ladon {

std::vector<std::int64_t> share_ranks(std::span<const std::vector<double>> spectra,
                                      std::int64_t mean_rank) {
  constexpr std::string_view kOperation = "share_ranks";
  std::int64_t components = 0;
  for (const std::vector<double>& spectrum : spectra) {
    const bool falls = std::is_sorted(spectrum.rbegin(), spectrum.rend()) &&
                       std::all_of(spectrum.begin(), spectrum.end(),
                                   [](double energy) { return std::isfinite(energy); });
    if (spectrum.empty() || !falls) {
      fail(kOperation, "spectra",
           spectrum.empty() ? "got an empty one, expected those of conversions with a rank"
                            : "got one that rises or is not finite, expected falling energies");
    }
    components += static_cast<std::int64_t>(spectrum.size());
  }
  const auto layers = static_cast<std::int64_t>(spectra.size());
  if (mean_rank < 1 || (layers > 0 && mean_rank > components / layers)) {
    fail(kOperation, "mean_rank",
         "got " + std::to_string(mean_rank) + ", expected 1 to " +
             std::to_string(layers == 0 ? 1 : components / layers) +
             ", the components that the layers have on average");
  }
  std::vector<std::int64_t> ranks(spectra.size(), 1);
  for (std::int64_t left = layers * (mean_rank - 1); left > 0; --left) {
    std::size_t best = spectra.size();
    double largest = 0;
    for (std::size_t n = 0; n < spectra.size(); ++n) {
      const auto next = static_cast<std::size_t>(ranks[n]);
      if (next >= spectra[n].size()) continue;
      if (best == spectra.size() || spectra[n][next] > largest) {
        best = n;
        largest = spectra[n][next];
      }
    }
    ++ranks[best];
  }
  return ranks;
}

}  // namespace ladon
