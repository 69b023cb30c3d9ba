#include "convert/latent_pairs.h"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

#include "convert/low_rank.h"

namespace ladon::convert {
namespace {

std::vector<PairComponent> components_of(const HeadLayout& layout, const GroupCost& cost,
                                         std::int64_t num_kv_heads) {
  const Group all = heads_in_order(num_kv_heads);
  std::vector<PairComponent> result;
  for (std::int64_t pair = 0; pair < layout.num_pairs(); ++pair) {
    const ComplexComponents components = principal_components(cost.weighted_pair(pair, all));
    const double scale = cost.mean_weight(all, pair);  // keeps keys about as large as they were
    for (std::int64_t j = 0; j < num_kv_heads; ++j) {
      PairComponent component{.pair = pair, .component = j, .energy = components.energies(j)};
      for (const std::int64_t head : all) {
        const Complex element = std::conj(components.vectors(head, j));
        const double weight = cost.pair_weight(head, pair) / scale;
        component.key_factors.push_back(element * weight);
        component.query_factors.push_back(element / weight);
      }
      result.push_back(std::move(component));
    }
  }
  return result;
}

/// The order in which components are kept roped: smaller ranks first.
std::vector<double> ranks_of(const std::vector<PairComponent>& components,
                             const std::vector<double>& losses, RopeChoice choice,
                             std::int64_t num_pairs, std::int64_t count) {
  std::vector<double> ranks;
  for (std::size_t n = 0; n < components.size(); ++n) {
    const PairComponent& component = components[n];
    if (choice == RopeChoice::kEachFrequency) {
      // Whole components first; of the last one, evenly spaced frequencies.
      const std::int64_t left = count - component.component * num_pairs;
      const bool spaced = left > 0 && left < num_pairs;
      const bool kept = spaced && component.pair * left / num_pairs !=
                                      (component.pair - 1 + num_pairs) * left / num_pairs - left;
      const auto base = static_cast<double>(2 * component.component);
      ranks.push_back(spaced && !kept ? base + 1 : base);
    } else {
      ranks.push_back(-losses[n]);
    }
  }
  return ranks;
}

}  // namespace

PairChoice choose_pairs(const HeadLayout& layout, const GroupCost& cost, std::int64_t num_kv_heads,
                        std::int64_t count, RopeChoice choice, std::int64_t positions,
                        bool causal) {
  std::vector<PairComponent> components = components_of(layout, cost, num_kv_heads);
  // What the scores lose without rope: all of a component whose frequency is 0 is kept, and without
  // a context all of any other counts as lost.
  const bool by_context = choice == RopeChoice::kScoreError && positions > 0;
  std::vector<Complex> phases;
  for (const double frequency : layout.frequencies) {
    phases.push_back(by_context ? mean_phase(frequency, positions, causal) : Complex(1, 0));
  }
  std::vector<double> losses;
  double total = 0;
  for (const PairComponent& component : components) {
    const auto pair = static_cast<std::size_t>(component.pair);
    const double share = layout.frequencies[pair] == 0 ? 0
                         : by_context                  ? 1 - std::norm(phases[pair])
                                                       : 1;
    losses.push_back(component.energy * std::max(0.0, share));
    total += component.energy;
  }
  const std::vector<double> ranks = ranks_of(components, losses, choice, layout.num_pairs(), count);
  std::vector<std::size_t> order(components.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return ranks[a] < ranks[b]; });
  const auto kept = order.begin() + count;
  std::sort(order.begin(), kept);
  std::sort(kept, order.end());

  PairChoice result;
  for (auto n = order.begin(); n != order.end(); ++n) {
    PairComponent& component = components[*n];
    if (n < kept) {
      result.roped.push_back(std::move(component));
      continue;
    }
    if (total > 0) result.discarded += losses[*n] / total;
    const Complex phase = std::conj(phases[static_cast<std::size_t>(component.pair)]);
    const double magnitude = layout.magnitude * layout.magnitude;
    for (Complex& factor : component.query_factors) factor *= phase * magnitude;
    result.unroped.push_back(std::move(component));
  }
  return result;
}

RealMatrix component_rows(const PairComponent& component, const RealMatrix& key,
                          const HeadLayout& layout) {
  const HeadLayout::Pair rows = layout.pairs[static_cast<std::size_t>(component.pair)];
  RealMatrix sum = RealMatrix::Zero(2, key.cols());
  for (std::size_t head = 0; head < component.key_factors.size(); ++head) {
    const std::int64_t first = static_cast<std::int64_t>(head) * layout.head_dim;
    RealMatrix part(2, key.cols());
    part.row(0) = key.row(first + rows.a);
    part.row(1) = key.row(first + rows.b);
    multiply_pair(part, {0, 1}, component.key_factors[head]);
    sum += part;
  }
  return sum;
}

}  // namespace ladon::convert
