// MHA, GQA or MQA as latent attention. The keys of all KV heads become components that all query
// heads share; some stay roped, from the others rope is taken off. What has no rope, keys and
// values together, is approximated by one latent of low rank. Up-projections, queries and W_o stay
// per head.
#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>
#include <utility>

#include "convert/host_context.h"
#include "convert/latent_pairs.h"
#include "convert/low_rank.h"
#include "convert/matrices.h"
#include "core/checks.h"
#include "core/fail.h"

namespace ladon {
namespace convert {
namespace {

constexpr std::string_view kOperation = "to_mla";

void check_source(const MultiHeadAttentionOptions& options) {
  const auto refuse = [](std::string_view field, const std::string& got,
                         std::string_view expected) {
    fail(ErrorCode::kUnsupported, kOperation, field,
         "got " + got + ", expected " + std::string(expected) +
             ": latent attention does not have it");
  };
  require_self_attention(kOperation, options);
  if (options.qk_norm) refuse("qk_norm", "true", "false");
  if (options.softcap != 0) refuse("softcap", text_of(options.softcap), "0");
  if (options.window_left) refuse("window_left", std::to_string(*options.window_left), "none");
  if (options.window_right) refuse("window_right", std::to_string(*options.window_right), "none");
  if (!options.alibi_slopes.empty()) refuse("alibi_slopes", "slopes", "none");
  if (options.sinks) refuse("sinks", "true", "false");
}

/// How many components stay roped.
std::int64_t roped_count(const MlaConversion& conversion, std::int64_t most) {
  if (!conversion.rope_dim) return most;
  const std::int64_t dim = *conversion.rope_dim;
  if (dim < 0 || dim % 2 != 0 || dim / 2 > most) {
    fail(kOperation, "rope_dim",
         "got " + std::to_string(dim) + ", expected an even number from 0 to " +
             std::to_string(2 * most) + ", the rotated elements of all KV heads");
  }
  return dim / 2;
}

void check_conversion(const MlaConversion& conversion) {
  const int choice = static_cast<int>(conversion.choice);
  if (choice < 0 || choice > 2) {
    fail(kOperation, "choice", "got " + std::to_string(choice) + ", expected a RopeChoice");
  }
  constexpr std::int64_t kMostPositions = std::int64_t{1} << 24;
  if (conversion.context < 0 || conversion.context > kMostPositions) {
    fail(kOperation, "context",
         "got " + std::to_string(conversion.context) + ", expected 0 to " +
             std::to_string(kMostPositions));
  }
}

class LatentBuilder {
 public:
  LatentBuilder(const Context& host, const MultiHeadAttention& layer, const RealMatrix& inputs,
                const HeadLayout& layout, const LayerMoments& moments, PairChoice choice)
      : host_(host),
        layer_(layer),
        inputs_(inputs),
        layout_(layout),
        moments_(moments),
        choice_(std::move(choice)),
        dim_(layer.head_dim()),
        kv_heads_(layer.num_kv_heads()),
        heads_per_kv_(layer.num_heads() / kv_heads_),
        out_(read_parameter(host, layer, "out_proj.weight")) {
    find_nope_rows();
    const std::int64_t unroped = 2 * static_cast<std::int64_t>(choice_.unroped.size());
    key_rows_ = unroped + kv_heads_ * layout_.unrotated();
    joint_.resize(key_rows_ + kv_heads_ * dim_, moments.key.cols());
    for (std::size_t n = 0; n < choice_.unroped.size(); ++n) {
      joint_.middleRows(2 * static_cast<std::int64_t>(n), 2) =
          component_rows(choice_.unroped[n], moments.key, layout_);
    }
    for (std::int64_t k = 0; k < kv_heads_; ++k) {
      joint_.middleRows(unroped + k * layout_.unrotated(), layout_.unrotated()) =
          moments.key.middleRows(k * dim_ + layout_.first_unrotated, layout_.unrotated());
    }
    joint_.bottomRows(kv_heads_ * dim_) = moments.value;
  }

  std::int64_t joint_rows() const { return joint_.rows(); }

  /// The latent of this rank; the numerical rank where there is none.
  void approximate(std::optional<std::int64_t> rank, ConversionSummary& summary) {
    if (!rank) {
      // Orthonormal rows of the row space: exact, and without the squares of a moment matrix.
      low_.up = column_space(joint_);
      low_.down = low_.up.transpose();
    } else {
      const RealMatrix moments = second_moment(host_, joint_, inputs_);
      low_ = low_rank(host_, moments, metric(moments), *rank);
      low_.describe(summary);
    }
    latent_ = times(host_, low_.down, joint_);
    const RealMatrix rebuilt = times(host_, low_.up, latent_);
    const double residual =
        std::max(relative_residual(joint_.topRows(key_rows_), rebuilt.topRows(key_rows_)),
                 relative_residual(joint_.bottomRows(kv_heads_ * dim_),
                                   rebuilt.bottomRows(kv_heads_ * dim_)));
    const double tolerance = exact_tolerance(layer_.dtype());
    summary.rope_discarded = choice_.discarded;
    summary.exact = residual <= tolerance && choice_.discarded <= tolerance * tolerance;
  }

  LatentAttention build() const {
    const MultiHeadAttentionOptions& source = layer_.options();
    LatentAttentionOptions options{
        .embed_dim = source.embed_dim,
        .num_heads = source.num_heads,
        .kv_rank = latent_.rows(),
        .nope_dim = nope_dim(),
        .rope_dim = rope_dim(),
        .value_dim = dim_,
        .query_bias = source.query_bias,
        .kv_bias = source.key_bias || source.value_bias,
        .out_bias = source.out_bias,
        .query_norm = false,
        .kv_norm = false,
        .causal = source.causal,
        // The source's, which is not what the new sizes suggest.
        .scale = source.scale.value_or(1 / std::sqrt(static_cast<double>(dim_))),
        .dropout = source.dropout,
        .dtype = source.dtype};
    if (options.rope_dim > 0) {
      for (const PairComponent& component : choice_.roped) {
        options.rope.frequencies.push_back(
            layout_.frequencies[static_cast<std::size_t>(component.pair)]);
      }
      options.rope.magnitude = layout_.magnitude;
    }
    LatentAttention result = LatentAttention::zeros(options);
    write_affine(host_, result, "q_proj", queries());
    RealMatrix compress(latent_.rows() + rope_dim(), latent_.cols());
    compress.topRows(latent_.rows()) = latent_;
    for (std::size_t n = 0; n < choice_.roped.size(); ++n) {
      compress.middleRows(latent_.rows() + 2 * static_cast<std::int64_t>(n), 2) =
          component_rows(choice_.roped[n], moments_.key, layout_);
    }
    write_affine(host_, result, "kv_a_proj_with_mqa", compress);
    write_parameter(host_, result, "kv_b_proj.weight", up_projections());
    write_parameter(host_, result, "o_proj.weight", out_);
    if (source.out_bias) {
      write_parameter(host_, result, "o_proj.bias", read_parameter(host_, layer_, "out_proj.bias"));
    }
    result.train(layer_.is_training());
    return result;
  }

 private:
  /// Rows of a query head that meet keys without rope: pairs of which some component is unroped,
  /// and the unrotated ones.
  void find_nope_rows() {
    std::vector<bool> needed(layout_.pairs.size(), false);
    for (const PairComponent& component : choice_.unroped) {
      needed[static_cast<std::size_t>(component.pair)] = true;
    }
    nope_index_.assign(static_cast<std::size_t>(dim_), -1);
    const auto add = [&](std::int64_t row) {
      nope_index_[static_cast<std::size_t>(row)] = static_cast<std::int64_t>(nope_rows_.size());
      nope_rows_.push_back(row);
    };
    for (std::size_t pair = 0; pair < layout_.pairs.size(); ++pair) {
      if (!needed[pair]) continue;
      add(layout_.pairs[pair].a);
      add(layout_.pairs[pair].b);
    }
    for (std::int64_t row = layout_.first_unrotated; row < dim_; ++row) add(row);
  }

  // A layer has one element without rope at least: one of zeros where none is needed.
  std::int64_t nope_dim() const {
    return std::max<std::int64_t>(1, static_cast<std::int64_t>(nope_rows_.size()));
  }
  std::int64_t rope_dim() const { return 2 * static_cast<std::int64_t>(choice_.roped.size()); }

  /// T of KV head k: a query's needed rows q meet the keys without rope as (T q) . keys.
  RealMatrix query_map(std::int64_t kv_head) const {
    RealMatrix map = RealMatrix::Zero(key_rows_, nope_dim());
    const auto index = [&](std::int64_t row) { return nope_index_[static_cast<std::size_t>(row)]; };
    for (std::size_t n = 0; n < choice_.unroped.size(); ++n) {
      const PairComponent& component = choice_.unroped[n];
      const HeadLayout::Pair pair = layout_.pairs[static_cast<std::size_t>(component.pair)];
      const Complex factor = component.query_factors[static_cast<std::size_t>(kv_head)];
      const auto row = 2 * static_cast<std::int64_t>(n);
      map(row, index(pair.a)) = map(row + 1, index(pair.b)) = factor.real();
      map(row, index(pair.b)) = -factor.imag();
      map(row + 1, index(pair.a)) = factor.imag();
    }
    const std::int64_t first =
        2 * static_cast<std::int64_t>(choice_.unroped.size()) + kv_head * layout_.unrotated();
    for (std::int64_t n = 0; n < layout_.unrotated(); ++n) {
      map(first + n, index(layout_.first_unrotated + n)) = 1;
    }
    return map;
  }

  /// Errors count where they act: of keys in the scores of the queries that meet them, of values in
  /// the output; both in all alike.
  RealMatrix metric(const RealMatrix& moments) const {
    RealMatrix metric = RealMatrix::Zero(joint_.rows(), joint_.rows());
    auto keys = metric.topLeftCorner(key_rows_, key_rows_);
    for (std::int64_t k = 0; k < kv_heads_ && key_rows_ > 0; ++k) {
      const RealMatrix map = query_map(k);
      RealMatrix query = RealMatrix::Zero(nope_dim(), nope_dim());
      for (std::size_t i = 0; i < nope_rows_.size(); ++i) {
        for (std::size_t j = 0; j < nope_rows_.size(); ++j) {
          query(static_cast<std::int64_t>(i), static_cast<std::int64_t>(j)) =
              moments_.query_moments[static_cast<std::size_t>(k)](nope_rows_[i], nope_rows_[j]);
        }
      }
      keys += times_transposed(host_, times_transposed(host_, map, query), map);
    }
    const std::int64_t values = kv_heads_ * dim_;
    for (std::int64_t h = 0; h < layer_.num_heads(); ++h) {
      const std::int64_t row = key_rows_ + h / heads_per_kv_ * dim_;
      const RealMatrix columns = out_.middleCols(h * dim_, dim_).transpose();
      metric.block(row, row, dim_, dim_) += times_transposed(host_, columns, columns);
    }
    equalise(keys, moments.topLeftCorner(key_rows_, key_rows_));
    equalise(metric.bottomRightCorner(values, values), moments.bottomRightCorner(values, values));
    return metric;
  }

  static void equalise(ladon_eigen::Ref<RealMatrix> metric, const RealMatrix& moments) {
    add_ridge(metric, kMetricRidge);
    const double energy = metric.cwiseProduct(moments).sum();
    if (energy > 0) metric /= energy;
  }

  /// [nope | rope] of each head.
  RealMatrix queries() const {
    const std::int64_t width = nope_dim() + rope_dim();
    RealMatrix result = RealMatrix::Zero(layer_.num_heads() * width, moments_.query.cols());
    for (std::int64_t h = 0; h < layer_.num_heads(); ++h) {
      for (std::size_t n = 0; n < nope_rows_.size(); ++n) {
        result.row(h * width + static_cast<std::int64_t>(n)) =
            moments_.query.row(h * dim_ + nope_rows_[n]);
      }
      for (std::size_t n = 0; n < choice_.roped.size(); ++n) {
        const PairComponent& component = choice_.roped[n];
        const HeadLayout::Pair pair = layout_.pairs[static_cast<std::size_t>(component.pair)];
        RealMatrix rows(2, moments_.query.cols());
        rows.row(0) = moments_.query.row(h * dim_ + pair.a);
        rows.row(1) = moments_.query.row(h * dim_ + pair.b);
        multiply_pair(rows, {0, 1},
                      component.query_factors[static_cast<std::size_t>(h / heads_per_kv_)]);
        result.middleRows(h * width + nope_dim() + 2 * static_cast<std::int64_t>(n), 2) = rows;
      }
    }
    return result;
  }

  /// [W_uk; W_uv] of each head.
  RealMatrix up_projections() const {
    const std::int64_t rows = nope_dim() + dim_;
    RealMatrix result = RealMatrix::Zero(layer_.num_heads() * rows, latent_.rows());
    for (std::int64_t h = 0; h < layer_.num_heads(); ++h) {
      const std::int64_t k = h / heads_per_kv_;
      if (h % heads_per_kv_ == 0) {
        result.middleRows(h * rows, nope_dim()) =
            times(host_, query_map(k).transpose(), low_.up.topRows(key_rows_));
        result.middleRows(h * rows + nope_dim(), dim_) =
            low_.up.middleRows(key_rows_ + k * dim_, dim_);
      } else {  // as the first query head of the KV head
        result.middleRows(h * rows, rows) = result.middleRows((h - 1) * rows, rows).eval();
      }
    }
    return result;
  }

  const Context& host_;
  const MultiHeadAttention& layer_;
  const RealMatrix& inputs_;
  const HeadLayout& layout_;
  const LayerMoments& moments_;
  PairChoice choice_;
  std::int64_t dim_, kv_heads_, heads_per_kv_;
  RealMatrix out_;
  std::vector<std::int64_t> nope_rows_{};   // of a query head
  std::vector<std::int64_t> nope_index_{};  // of each row among them; -1: not one of them
  std::int64_t key_rows_ = 0;
  RealMatrix joint_;   // keys without rope, then values: [W | b]
  LowRank low_;        // of them
  RealMatrix latent_;  // down-projection, [W | b]
};

}  // namespace
}  // namespace convert

ConvertedLatent to_mla(const Context& context, const MultiHeadAttention& layer,
                       const MlaConversion& conversion, const Calibration* calibration) {
  using namespace convert;
  check_device(Operation(kOperation, context), "layer", layer.device());
  const MultiHeadAttentionOptions& options = layer.options();
  check_source(options);
  check_conversion(conversion);
  const HostContext host(context);
  const HeadLayout layout(options.rope, options.head_dim);
  const std::int64_t most = layout.num_pairs() * options.num_kv_heads;
  const std::int64_t count = roped_count(conversion, most);
  require_finite(kOperation, host, layer);
  const RealMatrix inputs = input_moments(kOperation, host, calibration, options.embed_dim);
  const LayerMoments moments(host, layer, inputs);
  const GroupCost cost(host, moments, layout);
  const std::int64_t positions = conversion.context != 0  ? conversion.context
                                 : calibration != nullptr ? calibration->longest()
                                                          : 0;
  LatentBuilder builder(host, layer, inputs, layout, moments,
                        choose_pairs(layout, cost, options.num_kv_heads, count, conversion.choice,
                                     positions, options.causal));
  if (conversion.kv_rank &&
      (*conversion.kv_rank < 1 || *conversion.kv_rank > builder.joint_rows())) {
    fail(kOperation, "kv_rank",
         "got " + std::to_string(*conversion.kv_rank) + ", expected 1 to " +
             std::to_string(builder.joint_rows()) + ", the keys without rope and the values");
  }
  ConversionSummary summary{.cache_before = cache_elements(layer)};
  builder.approximate(conversion.kv_rank, summary);
  LatentAttention result = builder.build();
  summary.cache_after = cache_elements(result);
  summary.head_order = heads_in_order(options.num_heads);
  result.to(context);
  return {std::move(result), std::move(summary)};
}

}  // namespace ladon
