// Which KV heads are merged into one.
#pragma once

#include <cstdint>
#include <vector>

#include "convert/moments.h"
#include "convert/rope_pairs.h"

namespace ladon::convert {

using Group = std::vector<std::int64_t>;  // KV heads of the source, ascending

/// What merging heads by principal components leaves out, as shares of the layer's energy of keys
/// (weighted by the queries that meet them) and of values.
class GroupCost {
 public:
  GroupCost(const Context& host, const LayerMoments& moments, const HeadLayout& layout);

  double operator()(const Group& group) const;

  /// The weight of a KV head's pair: the rms of its queries there, or a small share of the largest
  /// where they are 0.
  double pair_weight(std::int64_t head, std::int64_t pair) const;
  /// Over some heads.
  double mean_weight(const Group& group, std::int64_t pair) const;
  /// Hermitian moments of a pair over some heads, weighted so.
  ComplexMatrix weighted_pair(std::int64_t pair, const Group& group) const;
  /// Moments of the unrotated rows of keys over some heads, and the metric of their queries.
  RealMatrix unrotated_moments(const Group& group) const;
  RealMatrix unrotated_metric(const Group& group) const;
  RealMatrix value_moments(const Group& group) const;

 private:
  const Context& host_;
  const LayerMoments& moments_;
  const HeadLayout& layout_;
  RealMatrix pair_weights_;  // [KV heads, pairs]
  double key_energy_ = 0;
  double value_energy_ = 0;
};

std::vector<Group> consecutive_groups(std::int64_t num_heads, std::int64_t num_groups);

/// Groups of equal size whose costs have a small sum: never more than consecutive ones have.
std::vector<Group> best_groups(const GroupCost& cost, std::int64_t num_heads,
                               std::int64_t num_groups, std::int64_t head_dim);

}  // namespace ladon::convert
