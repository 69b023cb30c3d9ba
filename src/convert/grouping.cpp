#include "convert/grouping.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "convert/low_rank.h"

namespace ladon::convert {
namespace {

// A query that is 0 for a pair says nothing of its keys; it must not make them vanish.
constexpr double kSmallestWeight = 1e-6;
// Operations that the search over exact costs may take: some seconds.
constexpr double kMostOperations = 1e10;
constexpr int kMostRounds = 50;

/// Rows [offset, offset + count) of some heads, one after the other, of moments over all heads.
RealMatrix block_of(const RealMatrix& moments, const Group& group, std::int64_t head_dim,
                    std::int64_t offset, std::int64_t count) {
  const auto heads = static_cast<std::int64_t>(group.size());
  RealMatrix block(heads * count, heads * count);
  for (std::int64_t j = 0; j < heads; ++j) {
    for (std::int64_t k = 0; k < heads; ++k) {
      block.block(j * count, k * count, count, count) =
          moments.block(group[static_cast<std::size_t>(j)] * head_dim + offset,
                        group[static_cast<std::size_t>(k)] * head_dim + offset, count, count);
    }
  }
  return block;
}

/// Swaps heads of two groups while that lowers the sum of their costs.
template <class Cost>
void swap_heads(std::vector<Group>& groups, const Cost& cost) {
  std::vector<double> costs;
  costs.reserve(groups.size());
  for (const Group& group : groups) costs.push_back(cost(group));
  bool improved = true;
  for (int round = 0; improved && round < kMostRounds; ++round) {
    improved = false;
    for (std::size_t a = 0; a < groups.size(); ++a) {
      for (std::size_t b = a + 1; b < groups.size(); ++b) {
        for (std::size_t i = 0; i < groups[a].size(); ++i) {
          for (std::size_t j = 0; j < groups[b].size(); ++j) {
            std::swap(groups[a][i], groups[b][j]);
            const double cost_a = cost(groups[a]);
            const double cost_b = cost(groups[b]);
            // By more than rounding, so that equal groups do not change places for ever.
            if (cost_a + cost_b < (costs[a] + costs[b]) * (1 - 1e-9) - 1e-15) {
              costs[a] = cost_a;
              costs[b] = cost_b;
              improved = true;
            } else {
              std::swap(groups[a][i], groups[b][j]);
            }
          }
        }
      }
    }
  }
}

/// Starts each group with the first free head and adds the nearest ones.
std::vector<Group> nearest_groups(const RealMatrix& pair_costs, std::int64_t num_groups) {
  const std::int64_t heads = pair_costs.rows();
  std::vector<bool> taken(static_cast<std::size_t>(heads), false);
  std::vector<Group> groups;
  for (std::int64_t head = 0; head < heads; ++head) {
    if (taken[static_cast<std::size_t>(head)]) continue;
    Group group{head};
    taken[static_cast<std::size_t>(head)] = true;
    while (std::cmp_less(group.size(), heads / num_groups)) {
      std::int64_t nearest = -1;
      double smallest = 0;
      for (std::int64_t other = 0; other < heads; ++other) {
        if (taken[static_cast<std::size_t>(other)]) continue;
        double sum = 0;
        for (const std::int64_t member : group) sum += pair_costs(member, other);
        if (nearest < 0 || sum < smallest) {
          nearest = other;
          smallest = sum;
        }
      }
      group.push_back(nearest);
      taken[static_cast<std::size_t>(nearest)] = true;
    }
    groups.push_back(std::move(group));
  }
  return groups;
}

double sum_of_costs(const std::vector<Group>& groups, const GroupCost& cost) {
  double sum = 0;
  for (const Group& group : groups) sum += cost(group);
  return sum;
}

}  // namespace

GroupCost::GroupCost(const Context& host, const LayerMoments& moments, const HeadLayout& layout)
    : host_(host), moments_(moments), layout_(layout) {
  const auto heads = static_cast<std::int64_t>(moments.query_moments.size());
  pair_weights_.resize(heads, layout.num_pairs());
  for (std::int64_t pair = 0; pair < layout.num_pairs(); ++pair) {
    const auto [a, b] = layout.pairs[static_cast<std::size_t>(pair)];
    for (std::int64_t head = 0; head < heads; ++head) {
      const RealMatrix& query = moments.query_moments[static_cast<std::size_t>(head)];
      pair_weights_(head, pair) = std::sqrt(std::max(0.0, query(a, a) + query(b, b)));
    }
    const double largest = pair_weights_.col(pair).maxCoeff();
    pair_weights_.col(pair) =
        pair_weights_.col(pair).cwiseMax(largest > 0 ? kSmallestWeight * largest : 1.0);
  }
  for (std::int64_t head = 0; head < heads; ++head) {
    const Group one{head};
    for (std::int64_t pair = 0; pair < layout.num_pairs(); ++pair) {
      key_energy_ += weighted_pair(pair, one)(0, 0).real();
    }
    if (layout.unrotated() > 0) {
      key_energy_ += (unrotated_metric(one) * unrotated_moments(one)).trace();
    }
    value_energy_ += value_moments(one).trace();
  }
}

double GroupCost::pair_weight(std::int64_t head, std::int64_t pair) const {
  return pair_weights_(head, pair);
}

double GroupCost::mean_weight(const Group& group, std::int64_t pair) const {
  double sum = 0;
  for (const std::int64_t head : group) sum += pair_weights_(head, pair);
  return sum / static_cast<double>(group.size());
}

ComplexMatrix GroupCost::weighted_pair(std::int64_t pair, const Group& group) const {
  ComplexMatrix moments = pair_moments(moments_.key_moments, layout_, pair, group);
  for (std::int64_t j = 0; j < moments.rows(); ++j) {
    const double weight = pair_weights_(group[static_cast<std::size_t>(j)], pair);
    moments.row(j) *= weight;
    moments.col(j) *= weight;
  }
  return moments;
}

RealMatrix GroupCost::unrotated_moments(const Group& group) const {
  return block_of(moments_.key_moments, group, layout_.head_dim, layout_.first_unrotated,
                  layout_.unrotated());
}

RealMatrix GroupCost::unrotated_metric(const Group& group) const {
  const std::int64_t rows = layout_.unrotated();
  const auto heads = static_cast<std::int64_t>(group.size());
  RealMatrix metric = RealMatrix::Zero(heads * rows, heads * rows);
  for (std::int64_t j = 0; j < heads; ++j) {
    metric.block(j * rows, j * rows, rows, rows) =
        moments_.query_moments[static_cast<std::size_t>(group[static_cast<std::size_t>(j)])]
            .bottomRightCorner(rows, rows);
  }
  add_ridge(metric, kMetricRidge);
  return metric;
}

RealMatrix GroupCost::value_moments(const Group& group) const {
  return block_of(moments_.value_moments, group, layout_.head_dim, 0, layout_.head_dim);
}

double GroupCost::operator()(const Group& group) const {
  double keys = 0;
  for (std::int64_t pair = 0; pair < layout_.num_pairs(); ++pair) {
    keys += discarded_energy(weighted_pair(pair, group), /*rank=*/1);
  }
  if (layout_.unrotated() > 0) {
    const auto low =
        low_rank(host_, unrotated_moments(group), unrotated_metric(group), layout_.unrotated());
    keys += low.discarded();
  }
  const double values = discarded_energy(value_moments(group), layout_.head_dim);
  return (key_energy_ > 0 ? keys / key_energy_ : 0) +
         (value_energy_ > 0 ? values / value_energy_ : 0);
}

std::vector<Group> consecutive_groups(std::int64_t num_heads, std::int64_t num_groups) {
  std::vector<Group> groups(static_cast<std::size_t>(num_groups));
  for (std::int64_t head = 0; head < num_heads; ++head) {
    groups[static_cast<std::size_t>(head / (num_heads / num_groups))].push_back(head);
  }
  return groups;
}

std::vector<Group> best_groups(const GroupCost& cost, std::int64_t num_heads,
                               std::int64_t num_groups, std::int64_t head_dim) {
  std::vector<Group> best = consecutive_groups(num_heads, num_groups);
  if (num_groups == 1 || num_groups == num_heads) return best;
  double best_cost = sum_of_costs(best, cost);

  // The cost of each pair of heads stands for that of larger groups, which would have to be
  // computed for every candidate.
  RealMatrix pair_costs = RealMatrix::Zero(num_heads, num_heads);
  for (std::int64_t a = 0; a < num_heads; ++a) {
    for (std::int64_t b = a + 1; b < num_heads; ++b) {
      pair_costs(a, b) = pair_costs(b, a) = cost({a, b});
    }
  }
  const auto by_pairs = [&](const Group& group) {
    double sum = 0;
    for (const std::int64_t a : group) {
      for (const std::int64_t b : group) sum += pair_costs(a, b);
    }
    return sum;
  };
  for (std::vector<Group> candidate : {nearest_groups(pair_costs, num_groups), best}) {
    swap_heads(candidate, by_pairs);
    const double candidate_cost = sum_of_costs(candidate, cost);
    if (candidate_cost < best_cost) {
      best = std::move(candidate);
      best_cost = candidate_cost;
    }
  }
  const std::int64_t size = num_heads / num_groups;
  const double swaps = static_cast<double>(num_heads * num_heads) / 2;
  if (size > 2 && swaps * std::pow(static_cast<double>(size * head_dim), 3) <= kMostOperations) {
    swap_heads(best, cost);
  }
  for (Group& group : best) std::sort(group.begin(), group.end());
  std::sort(best.begin(), best.end());
  return best;
}

}  // namespace ladon::convert
