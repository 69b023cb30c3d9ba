// Fewer KV heads by merging groups of them. A group of heads has one key and one value afterwards,
// so each pair of its keys, and its values, are approximated by their principal components: one
// complex number for each pair, head_dim real ones for the values. Queries and the output
// projection take up the other factor, which commutes with rope.
#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "convert/grouping.h"
#include "convert/host_context.h"
#include "convert/low_rank.h"
#include "convert/matrices.h"
#include "convert/repeat.h"
#include "core/checks.h"
#include "core/fail.h"

namespace ladon {
namespace convert {
namespace {

constexpr std::string_view kOperation = "to_gqa";

class HeadMerger {
 public:
  HeadMerger(const Context& host, const MultiHeadAttention& layer, const LayerMoments& moments,
             const HeadLayout& layout, const GroupCost& cost, std::int64_t num_groups)
      : host_(host),
        layer_(layer),
        moments_(moments),
        layout_(layout),
        cost_(cost),
        dim_(layer.head_dim()),
        heads_per_kv_(layer.num_heads() / layer.num_kv_heads()),
        query(moments.query),
        key(RealMatrix::Zero(num_groups * dim_, moments.key.cols())),
        value(RealMatrix::Zero(num_groups * dim_, moments.value.cols())),
        out(read_parameter(host, layer, "out_proj.weight")) {}

  void merge(const Group& group, std::int64_t target, HeadMerge method) {
    if (method == HeadMerge::kFirst || is_repeated(group)) {
      set(target, moments_.key.middleRows(group[0] * dim_, dim_),
          moments_.value.middleRows(group[0] * dim_, dim_));
      if (!is_repeated(group)) exact_ = false;
      return;
    }
    if (method == HeadMerge::kMean) {
      RealMatrix keys = RealMatrix::Zero(dim_, moments_.key.cols());
      RealMatrix values = RealMatrix::Zero(dim_, moments_.value.cols());
      for (const std::int64_t head : group) {
        keys += moments_.key.middleRows(head * dim_, dim_);
        values += moments_.value.middleRows(head * dim_, dim_);
      }
      const auto count = static_cast<double>(group.size());
      set(target, keys / count, values / count);
      exact_ = false;
      return;
    }
    for (std::int64_t pair = 0; pair < layout_.num_pairs(); ++pair) merge_pair(group, target, pair);
    if (layout_.unrotated() > 0) merge_unrotated(group, target);
    merge_values(group, target);
  }

  bool exact() const { return exact_; }

 private:
  /// Bit by bit, as repeat_kv_heads() leaves them.
  bool is_repeated(const Group& group) const {
    return std::all_of(group.begin(), group.end(), [&](std::int64_t head) {
      const auto same = [&](const RealMatrix& rows) {
        return rows.middleRows(head * dim_, dim_) == rows.middleRows(group[0] * dim_, dim_);
      };
      return same(moments_.key) && same(moments_.value);
    });
  }

  void set(std::int64_t target, const RealMatrix& keys, const RealMatrix& values) {
    key.middleRows(target * dim_, dim_) = keys;
    value.middleRows(target * dim_, dim_) = values;
  }

  template <class Change>
  void for_each_query_head(std::int64_t kv_head, Change&& change) {
    for (std::int64_t h = kv_head * heads_per_kv_; h < (kv_head + 1) * heads_per_kv_; ++h) {
      change(h);
    }
  }

  void note_residual(double residual) {
    if (residual > exact_tolerance(layer_.dtype())) exact_ = false;
  }

  void merge_pair(const Group& group, std::int64_t target, std::int64_t pair) {
    const ComplexComponents components = principal_components(cost_.weighted_pair(pair, group));
    const HeadLayout::Pair rows = layout_.pairs[static_cast<std::size_t>(pair)];
    const auto count = static_cast<std::int64_t>(group.size());
    const std::int64_t width = moments_.key.cols();
    const double scale = cost_.mean_weight(group, pair);  // keeps keys about as large as they were

    RealMatrix all(2 * count, width);  // the pair of every head, and what will stand for it
    RealMatrix approximation(2 * count, width);
    RealMatrix merged = RealMatrix::Zero(2, width);
    for (std::int64_t j = 0; j < count; ++j) {
      const std::int64_t head = group[static_cast<std::size_t>(j)];
      all.row(2 * j) = moments_.key.row(head * dim_ + rows.a);
      all.row(2 * j + 1) = moments_.key.row(head * dim_ + rows.b);
      RealMatrix part = all.middleRows(2 * j, 2);
      multiply_pair(part, {0, 1},
                    std::conj(components.vectors(j, 0)) * cost_.pair_weight(head, pair) / scale);
      merged += part;
    }
    key.row(target * dim_ + rows.a) = merged.row(0);
    key.row(target * dim_ + rows.b) = merged.row(1);
    for (std::int64_t j = 0; j < count; ++j) {
      const std::int64_t head = group[static_cast<std::size_t>(j)];
      // The head's own pair is this times the merged one.
      const Complex factor = components.vectors(j, 0) * scale / cost_.pair_weight(head, pair);
      approximation.middleRows(2 * j, 2) = merged;
      multiply_pair(approximation.middleRows(2 * j, 2), {0, 1}, factor);
      for_each_query_head(head, [&](std::int64_t h) {
        multiply_pair(query.middleRows(h * dim_, dim_), rows, std::conj(factor));
      });
    }
    note_residual(relative_residual(all, approximation));
  }

  /// Rows of the heads of a group, one head after the other.
  RealMatrix stack(const RealMatrix& rows, const Group& group, std::int64_t offset,
                   std::int64_t count) const {
    RealMatrix result(static_cast<std::int64_t>(group.size()) * count, rows.cols());
    for (std::size_t j = 0; j < group.size(); ++j) {
      result.middleRows(static_cast<std::int64_t>(j) * count, count) =
          rows.middleRows(group[j] * dim_ + offset, count);
    }
    return result;
  }

  void merge_unrotated(const Group& group, std::int64_t target) {
    const std::int64_t offset = layout_.first_unrotated;
    const std::int64_t count = layout_.unrotated();
    const LowRank low =
        low_rank(host_, cost_.unrotated_moments(group), cost_.unrotated_metric(group), count);
    const RealMatrix all = stack(moments_.key, group, offset, count);
    const RealMatrix merged = low.down * all;
    key.middleRows(target * dim_ + offset, count) = merged;
    for (std::size_t j = 0; j < group.size(); ++j) {
      const RealMatrix up = low.up.middleRows(static_cast<std::int64_t>(j) * count, count);
      for_each_query_head(group[j], [&](std::int64_t h) {
        const RealMatrix before = query.middleRows(h * dim_ + offset, count);
        query.middleRows(h * dim_ + offset, count) = up.transpose() * before;
      });
    }
    note_residual(relative_residual(all, low.up * merged));
  }

  void merge_values(const Group& group, std::int64_t target) {
    const LowRank low = low_rank(host_, cost_.value_moments(group), {}, dim_);
    const RealMatrix all = stack(moments_.value, group, 0, dim_);
    const RealMatrix merged = low.down * all;
    value.middleRows(target * dim_, dim_) = merged;
    for (std::size_t j = 0; j < group.size(); ++j) {
      const RealMatrix up = low.up.middleRows(static_cast<std::int64_t>(j) * dim_, dim_);
      for_each_query_head(group[j], [&](std::int64_t h) {
        const RealMatrix before = out.middleCols(h * dim_, dim_);
        out.middleCols(h * dim_, dim_) = before * up;
      });
    }
    note_residual(relative_residual(all, low.up * merged));
  }

  const Context& host_;
  const MultiHeadAttention& layer_;
  const LayerMoments& moments_;
  const HeadLayout& layout_;
  const GroupCost& cost_;
  std::int64_t dim_;
  std::int64_t heads_per_kv_;
  bool exact_ = true;

 public:
  RealMatrix query, key, value, out;  // query heads in the source's order
};

void check(const MultiHeadAttentionOptions& options, const GqaConversion& conversion) {
  const std::int64_t wanted = conversion.num_kv_heads;
  const std::int64_t had = options.num_kv_heads;
  if (wanted < 1 || options.num_heads % wanted != 0 || (had % wanted != 0 && wanted % had != 0)) {
    fail(kOperation, "num_kv_heads",
         "got " + std::to_string(wanted) + ", expected a divisor of num_heads = " +
             std::to_string(options.num_heads) + " that divides the layer's " +
             std::to_string(had) + " KV heads or is a multiple of them");
  }
  const auto check_enum = [](std::string_view argument, int value, int last,
                             std::string_view type) {
    if (value >= 0 && value <= last) return;
    fail(kOperation, argument,
         "got " + std::to_string(value) + ", expected a " + std::string(type));
  };
  check_enum("merge", static_cast<int>(conversion.merge), 2, "HeadMerge");
  check_enum("grouping", static_cast<int>(conversion.grouping), 1, "HeadGrouping");
  if (wanted < had) require_self_attention(kOperation, options);
  if (wanted < had && options.qk_norm && options.qk_norm_span == QkNormSpan::kAllHeads) {
    fail(ErrorCode::kUnsupported, kOperation, "qk_norm_span",
         "got a norm over all heads, expected one of each head: fewer heads have another norm");
  }
  if (wanted < had && options.qk_norm && options.qk_norm_span == QkNormSpan::kEachHead) {
    fail(ErrorCode::kUnsupported, kOperation, "qk_norm_span",
         "got weights of its own for each head, expected the same for all: the heads of a group "
         "would need one");
  }
  if (wanted < had && options.qk_norm && conversion.merge == HeadMerge::kPca) {
    fail(ErrorCode::kUnsupported, kOperation, "qk_norm",
         "got true, expected false: keys behind a norm are not linear in the input, and only the "
         "mean of heads or the first of them can stand for a group");
  }
}

/// Rows (or columns, of the transpose) of heads in another order.
RealMatrix in_order(const RealMatrix& rows, const std::vector<std::int64_t>& order,
                    std::int64_t head_rows) {
  RealMatrix result(rows.rows(), rows.cols());
  for (std::size_t n = 0; n < order.size(); ++n) {
    result.middleRows(static_cast<std::int64_t>(n) * head_rows, head_rows) =
        rows.middleRows(order[n] * head_rows, head_rows);
  }
  return result;
}

std::vector<std::int64_t> query_order(const std::vector<Group>& groups, std::int64_t heads_per_kv) {
  std::vector<std::int64_t> order;
  for (const Group& group : groups) {
    for (const std::int64_t kv_head : group) {
      for (std::int64_t h = 0; h < heads_per_kv; ++h) order.push_back(kv_head * heads_per_kv + h);
    }
  }
  return order;
}

}  // namespace
}  // namespace convert

ConvertedMultiHead to_gqa(const Context& context, const MultiHeadAttention& layer,
                          const GqaConversion& conversion, const Calibration* calibration) {
  using namespace convert;
  check_device(Operation(kOperation, context), "layer", layer.device());
  MultiHeadAttentionOptions options = layer.options();
  check(options, conversion);
  const HostContext host(context);
  const std::int64_t dim = options.head_dim;
  const std::int64_t had = options.num_kv_heads;
  const std::int64_t wanted = conversion.num_kv_heads;
  ConversionSummary summary{
      .exact = true, .cache_before = cache_elements(layer), .cache_after = 2 * wanted * dim};
  if (wanted >= had) {
    summary.head_order = heads_in_order(options.num_heads);
    return {repeat_kv_heads(context, layer, wanted), std::move(summary)};
  }
  require_finite(kOperation, host, layer);
  const RealMatrix inputs = input_moments(kOperation, host, calibration, options.embed_dim);
  const LayerMoments moments(host, layer, inputs);
  const HeadLayout layout(options.rope, dim);
  const GroupCost cost(host, moments, layout);
  const std::vector<Group> groups = conversion.grouping == HeadGrouping::kBest
                                        ? best_groups(cost, had, wanted, dim)
                                        : consecutive_groups(had, wanted);
  HeadMerger merger(host, layer, moments, layout, cost, wanted);
  for (std::size_t n = 0; n < groups.size(); ++n) {
    merger.merge(groups[n], static_cast<std::int64_t>(n), conversion.merge);
    // Half of it is the share of keys, half that of values.
    if (conversion.merge == HeadMerge::kPca) summary.discarded += 0.5 * cost(groups[n]);
  }
  summary.exact = merger.exact();
  summary.head_order = query_order(groups, options.num_heads / had);

  options.num_kv_heads = wanted;
  if (!options.alibi_slopes.empty()) {
    for (std::size_t n = 0; n < summary.head_order.size(); ++n) {
      options.alibi_slopes[n] =
          layer.options().alibi_slopes[static_cast<std::size_t>(summary.head_order[n])];
    }
  }
  MultiHeadAttention result = MultiHeadAttention::zeros(options);
  write_affine(host, result, "q_proj", in_order(merger.query, summary.head_order, dim));
  write_affine(host, result, "k_proj", merger.key);
  write_affine(host, result, "v_proj", merger.value);
  write_parameter(host, result, "out_proj.weight",
                  in_order(merger.out.transpose(), summary.head_order, dim).transpose());
  for (const char* const name : {"out_proj.bias", "q_norm.weight", "k_norm.weight"}) {
    if (result.has_parameter(name)) copy_parameter(host, layer, result, name);
  }
  if (result.has_parameter("sinks")) {
    write_parameter(host, result, "sinks",
                    in_order(read_parameter(host, layer, "sinks"), summary.head_order, 1));
  }
  result.train(layer.is_training());
  result.to(context);
  return {std::move(result), std::move(summary)};
}

}  // namespace ladon
