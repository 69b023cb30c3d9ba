// Channels of keys and values of about equal size, for caches that store a token's head with one
// scale. Rows of a projection are multiplied by powers of two, and what reads those channels is
// divided by them: rows of the query projection for keys, columns of the output projection for
// values. Behind a q/k norm the factors of keys go into the norms' weights instead.
#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "convert/host_context.h"
#include "convert/matrices.h"
#include "convert/moments.h"
#include "convert/rope_pairs.h"
#include "core/checks.h"

namespace ladon {
namespace convert {
namespace {

constexpr std::string_view kOperation = "balance_channels";
/// A channel that is further from the others is as good as zero, or as good as alone.
constexpr int kLargestExponent = 16;
/// Elements of a query may be 2^6 times as large as their RMS before they leave the dtype's range.
constexpr int kPeakExponent = 6;

/// Binary exponents of a dtype's smallest normal number and of its largest finite one.
struct DTypeExponents {
  int smallest;
  int largest;
};

DTypeExponents exponents_of(DType dtype) {
  if (dtype == DType::kF64) return {-1022, 1023};
  if (dtype == DType::kF16) return {-14, 15};
  return {-126, 127};  // f32 and bf16
}

/// The exponents of factors that are allowed; 0 always is.
struct ExponentLimits {
  int lowest = -kLargestExponent;
  int highest = kLargestExponent;

  /// The elements of a row that is multiplied by 2^e, or divided by it, must stay finite, and
  /// normal numbers where they are not 0.
  template <class Row>
  void keep_in_range(const Row& row, DTypeExponents range, bool divided) {
    const double largest = row.cwiseAbs().maxCoeff();
    if (largest == 0) return;
    double smallest = largest;
    for (const double element : row) {
      if (element != 0) smallest = std::min(smallest, std::abs(element));
    }
    const int down = std::max(std::ilogb(smallest) - range.smallest, 0);
    const int up = std::max(range.largest - std::ilogb(largest), 0);
    lowest = std::max(lowest, divided ? -up : -down);
    highest = std::min(highest, divided ? down : up);
  }
};

/// The exponent of the power of two that is nearest to a positive ratio, on a logarithmic scale.
int nearest_exponent(double ratio) {
  int exponent = 0;
  const double mantissa = std::frexp(ratio, &exponent);  // in [1/2, 1)
  return mantissa * std::numbers::sqrt2 < 1 ? exponent - 1 : exponent;
}

/// Channels of a head that have one factor: a rope pair, or one channel.
using Unit = std::vector<std::int64_t>;

std::vector<Unit> key_units(const MultiHeadAttentionOptions& options) {
  const HeadLayout layout(options.rope, options.head_dim);
  std::vector<Unit> units;
  for (const HeadLayout::Pair& pair : layout.pairs) units.push_back({pair.a, pair.b});
  for (std::int64_t n = layout.first_unrotated; n < options.head_dim; ++n) units.push_back({n});
  return units;
}

std::vector<Unit> value_units(const MultiHeadAttentionOptions& options) {
  std::vector<Unit> units;
  for (std::int64_t n = 0; n < options.head_dim; ++n) units.push_back({n});
  return units;
}

/// What gets factors. Row h * dim + n of `multiplied` is channel n of head h; the same channel of
/// the `group` heads that read it is in rows (h * group + j) * dim + n of `divided`.
struct Side {
  RealMatrix multiplied;
  RealMatrix divided;
  std::int64_t heads;
  std::int64_t group;
  RealVector mean_squares{};          // of the channels that the rows of `multiplied` give
  RealVector divided_mean_squares{};  // of those of `divided`; empty: they limit nothing
};

struct Spread {
  double before = 1;
  double after = 1;
};

class Balancer {
 public:
  Balancer(const MultiHeadAttentionOptions& options, BalanceSummary& summary)
      : dim_(options.head_dim), range_(exponents_of(options.dtype)), summary_(summary) {}

  Spread balance(Side& side, const std::vector<Unit>& units) {
    Spread worst;
    for (std::int64_t head = 0; head < side.heads; ++head) {
      const Spread spread = balance_head(side, units, head);
      worst.before = std::max(worst.before, spread.before);
      worst.after = std::max(worst.after, spread.after);
    }
    return worst;
  }

 private:
  /// The median of what is above 0, or 0. Channels near it keep a factor of 1.
  static double median(std::vector<double> sizes) {
    std::erase_if(sizes, [](double size) { return !(size > 0 && std::isfinite(size)); });
    if (sizes.empty()) return 0;
    std::sort(sizes.begin(), sizes.end());
    const std::size_t count = sizes.size();
    return std::sqrt(sizes[(count - 1) / 2]) * std::sqrt(sizes[count / 2]);
  }

  static double spread_of(const std::vector<double>& sizes) {
    const double middle = median(sizes);
    return middle > 0 ? *std::max_element(sizes.begin(), sizes.end()) / middle : 1;
  }

  Spread balance_head(Side& side, const std::vector<Unit>& units, std::int64_t head) {
    std::vector<double> sizes;
    for (const Unit& unit : units) {
      double sum = 0;
      for (const std::int64_t n : unit) sum += side.mean_squares(head * dim_ + n);
      sizes.push_back(std::sqrt(sum / static_cast<double>(unit.size())));
    }
    Spread spread{.before = spread_of(sizes)};
    const double target = median(sizes);
    for (std::size_t n = 0; n < units.size(); ++n) {
      if (!(sizes[n] > 0 && std::isfinite(sizes[n]))) continue;
      const int wanted = nearest_exponent(target / sizes[n]);
      const ExponentLimits limits = limits_of(side, units[n], head);
      const int exponent = std::clamp(wanted, limits.lowest, limits.highest);
      if (exponent != wanted) ++summary_.limited;
      if (exponent == 0) continue;
      multiply(side, units[n], head, exponent);
      sizes[n] = std::ldexp(sizes[n], exponent);
      summary_.largest_factor =
          std::max(summary_.largest_factor, std::ldexp(1.0, std::abs(exponent)));
    }
    spread.after = spread_of(sizes);
    return spread;
  }

  template <class Use>
  void for_each_divided_row(const Side& side, std::int64_t head, std::int64_t channel, Use&& use) {
    for (std::int64_t j = 0; j < side.group; ++j) use((head * side.group + j) * dim_ + channel);
  }

  ExponentLimits limits_of(const Side& side, const Unit& unit, std::int64_t head) {
    ExponentLimits limits;
    for (const std::int64_t channel : unit) {
      limits.keep_in_range(side.multiplied.row(head * dim_ + channel), range_, false);
      for_each_divided_row(side, head, channel, [&](std::int64_t row) {
        limits.keep_in_range(side.divided.row(row), range_, true);
        if (side.divided_mean_squares.size() == 0) return;
        const double size = std::sqrt(side.divided_mean_squares(row));
        if (!(size > 0)) return;
        const int up = std::max(range_.largest - kPeakExponent - std::ilogb(size), 0);
        limits.lowest = std::max(limits.lowest, -up);
      });
    }
    return limits;
  }

  void multiply(Side& side, const Unit& unit, std::int64_t head, int exponent) {
    for (const std::int64_t channel : unit) {
      side.multiplied.row(head * dim_ + channel) *= std::ldexp(1.0, exponent);
      for_each_divided_row(side, head, channel, [&](std::int64_t row) {
        side.divided.row(row) *= std::ldexp(1.0, -exponent);
      });
    }
  }

  std::int64_t dim_;
  DTypeExponents range_;
  BalanceSummary& summary_;
};

/// E[y^2] of each row of y = rows [x; 1].
RealVector mean_squares(const Context& host, const RealMatrix& rows, const RealMatrix& inputs) {
  if (inputs.size() == 0) return rows.rowwise().squaredNorm();
  const RealMatrix weighted = times_transposed(host, rows, inputs);
  return weighted.cwiseProduct(rows).rowwise().sum().cwiseMax(0.0);
}

/// The mean squares of rows behind a norm, without its weights, as far as second moments tell: the
/// mean square of a channel over that of all that the norm spans.
RealVector normed_mean_squares(const Context& host, RealMatrix rows, const RealMatrix& inputs,
                               const MultiHeadAttentionOptions& options) {
  const std::int64_t span =
      options.qk_norm_span == QkNormSpan::kAllHeads ? rows.rows() : options.head_dim;
  if (options.qk_norm_centered) {
    for (std::int64_t first = 0; first < rows.rows(); first += span) {
      const RealMatrix mean = rows.middleRows(first, span).colwise().mean();
      rows.middleRows(first, span).rowwise() -= mean.row(0);
    }
  }
  RealVector squares = mean_squares(host, rows, inputs);
  for (std::int64_t first = 0; first < rows.rows(); first += span) {
    squares.segment(first, span) /= squares.segment(first, span).mean() + options.qk_norm_epsilon;
  }
  return squares;
}

/// Queries ("q") or keys ("k") of a layer: the rows that factors go into, which are the weights of
/// their norm where they have one.
RealMatrix read_rows(const Context& host, const MultiHeadAttention& layer,
                     const std::string& name) {
  if (!layer.options().qk_norm) return read_affine(host, layer, name + "_proj");
  const RealMatrix weights = read_parameter(host, layer, name + "_norm.weight");
  return weights.reshaped<ladon_eigen::RowMajor>(weights.size(), 1);
}

void write_rows(const Context& host, MultiHeadAttention& layer, const std::string& name,
                const RealMatrix& rows) {
  if (layer.options().qk_norm) {
    write_parameter(host, layer, name + "_norm.weight", rows);
  } else {
    write_affine(host, layer, name + "_proj", rows);
  }
}

/// The mean squares of the channels of read_rows(). Those of heads that share a norm's weights are
/// averaged.
RealVector channel_mean_squares(const Context& host, const MultiHeadAttention& layer,
                                const std::string& name, const RealMatrix& inputs) {
  const RealMatrix projection = read_affine(host, layer, name + "_proj");
  if (!layer.options().qk_norm) return mean_squares(host, projection, inputs);
  const RealVector all = normed_mean_squares(host, projection, inputs, layer.options());
  const RealMatrix weights = read_rows(host, layer, name);
  const std::int64_t count = weights.rows();
  RealVector mean = RealVector::Zero(count);
  for (std::int64_t first = 0; first < all.size(); first += count) {
    mean += all.segment(first, count);
  }
  mean *= static_cast<double>(count) / static_cast<double>(all.size());
  return weights.col(0).cwiseAbs2().cwiseProduct(mean);
}

void balance_keys(const Context& host, MultiHeadAttention& layer, const RealMatrix& inputs,
                  BalanceSummary& summary) {
  const MultiHeadAttentionOptions& options = layer.options();
  const bool shared = options.qk_norm && options.qk_norm_span == QkNormSpan::kHead;
  Side side{.multiplied = read_rows(host, layer, "k"),
            .divided = read_rows(host, layer, "q"),
            .heads = shared ? 1 : options.num_kv_heads,
            .group = shared ? 1 : options.num_heads / options.num_kv_heads,
            .mean_squares = channel_mean_squares(host, layer, "k", inputs)};
  // Keys and values come near the median of their head, but queries become larger where keys were
  // large. Only f16 is so narrow that they might not fit.
  if (options.dtype == DType::kF16) {
    side.divided_mean_squares = channel_mean_squares(host, layer, "q", inputs);
  }
  const Spread spread = Balancer(options, summary).balance(side, key_units(options));
  summary.key_spread_before = spread.before;
  summary.key_spread_after = spread.after;
  write_rows(host, layer, "k", side.multiplied);
  write_rows(host, layer, "q", side.divided);
}

void balance_values(const Context& host, MultiHeadAttention& layer, const RealMatrix& inputs,
                    BalanceSummary& summary) {
  const MultiHeadAttentionOptions& options = layer.options();
  Side side{.multiplied = read_affine(host, layer, "v_proj"),
            .divided = read_parameter(host, layer, "out_proj.weight").transpose(),
            .heads = options.num_kv_heads,
            .group = options.num_heads / options.num_kv_heads};
  side.mean_squares = mean_squares(host, side.multiplied, inputs);
  const Spread spread = Balancer(options, summary).balance(side, value_units(options));
  summary.value_spread_before = spread.before;
  summary.value_spread_after = spread.after;
  write_affine(host, layer, "v_proj", side.multiplied);
  write_parameter(host, layer, "out_proj.weight", side.divided.transpose());
}

}  // namespace
}  // namespace convert

BalancedMultiHead balance_channels(const Context& context, const MultiHeadAttention& layer,
                                   const Calibration* calibration) {
  using namespace convert;
  check_device(Operation(kOperation, context), "layer", layer.device());
  const MultiHeadAttentionOptions& options = layer.options();
  require_self_attention(kOperation, options);
  const HostContext host(context);
  require_finite(kOperation, host, layer);
  const RealMatrix inputs = input_moments(kOperation, host, calibration, options.embed_dim);
  MultiHeadAttention result = MultiHeadAttention::zeros(options);
  for (const Parameter& parameter : layer.named_parameters()) {
    copy_parameter(host, layer, result, parameter.name);
  }
  BalanceSummary summary;
  // With an offset, w would become c (w + offset) - offset, which is rounded.
  summary.keys_balanced = !options.qk_norm || options.qk_norm_offset == 0;
  if (summary.keys_balanced) balance_keys(host, result, inputs, summary);
  balance_values(host, result, inputs, summary);
  result.train(layer.is_training());
  result.to(context);
  return {std::move(result), summary};
}

}  // namespace ladon
