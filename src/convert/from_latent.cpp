// Latent attention as MHA or as MQA, and with a latent of lower rank. All of it is algebra of the
// projections, so it needs them to be linear: without norms between them.
#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "convert/host_context.h"
#include "convert/low_rank.h"
#include "convert/matrices.h"
#include "convert/moments.h"
#include "core/checks.h"
#include "core/fail.h"

namespace ladon {
namespace convert {
namespace {

void refuse_norm(std::string_view operation, std::string_view field) {
  fail(ErrorCode::kUnsupported, operation, field,
       "got true, expected false: behind a norm the heads are not linear in the input");
}

/// The projections of a latent layer as [W | b] from the input.
struct LatentWeights {
  LatentWeights(std::string_view operation, const Context& host, const LatentAttention& layer)
      : options(layer.options()) {
    if (options.kv_norm) refuse_norm(operation, "kv_norm");
    if (options.query_rank > 0 && options.query_norm) refuse_norm(operation, "query_norm");
    require_finite(operation, host, layer);
    if (options.query_rank > 0) {
      const RealMatrix low = read_affine(host, layer, "q_a_proj");
      query = times(host, read_parameter(host, layer, "q_b_proj.weight"), low);
    } else {
      query = read_affine(host, layer, "q_proj");
    }
    const RealMatrix compress = read_affine(host, layer, "kv_a_proj_with_mqa");
    latent = compress.topRows(options.kv_rank);
    rope_key = compress.bottomRows(options.rope_dim);
    up = read_parameter(host, layer, "kv_b_proj.weight");
    out = read_parameter(host, layer, "o_proj.weight");
  }

  RealMatrix nope_query(std::int64_t h) const {
    return query.middleRows(h * (options.nope_dim + options.rope_dim), options.nope_dim);
  }
  RealMatrix rope_query(std::int64_t h) const {
    return query.middleRows(h * (options.nope_dim + options.rope_dim) + options.nope_dim,
                            options.rope_dim);
  }
  RealMatrix up_key(std::int64_t h) const {
    return up.middleRows(h * (options.nope_dim + options.value_dim), options.nope_dim);
  }
  RealMatrix up_value(std::int64_t h) const {
    return up.middleRows(h * (options.nope_dim + options.value_dim) + options.nope_dim,
                         options.value_dim);
  }
  RealMatrix out_columns(std::int64_t h) const {
    return out.middleCols(h * options.value_dim, options.value_dim);
  }

  const LatentAttentionOptions& options;
  RealMatrix query, latent, rope_key, up, out;
};

/// All that heads of this size share with the latent layer. Rope comes first in a head:
/// MultiHeadAttention rotates its leading elements.
MultiHeadAttentionOptions multi_head_options(const LatentAttentionOptions& latent,
                                             std::int64_t num_kv_heads, std::int64_t head_dim) {
  MultiHeadAttentionOptions options{.embed_dim = latent.embed_dim,
                                    .num_heads = latent.num_heads,
                                    .num_kv_heads = num_kv_heads,
                                    .head_dim = head_dim,
                                    .query_bias = latent.query_bias,
                                    .key_bias = latent.kv_bias,
                                    .value_bias = latent.kv_bias,
                                    .out_bias = latent.out_bias,
                                    .causal = latent.causal,
                                    .scale = latent.scale,
                                    .dropout = latent.dropout,
                                    .dtype = latent.dtype};
  if (latent.rope_dim > 0) {
    options.rope = latent.rope;
    options.rope->rotary_dim = latent.rope_dim;
  }
  return options;
}

/// The rows of one head: rope first, then the rest, then zeros.
void set_head(RealMatrix& rows, std::int64_t head, std::int64_t head_dim, const RealMatrix& rope,
              const RealMatrix& rest) {
  rows.middleRows(head * head_dim, rope.rows()) = rope;
  rows.middleRows(head * head_dim + rope.rows(), rest.rows()) = rest;
}

struct HeadRows {
  HeadRows(const MultiHeadAttentionOptions& options, std::int64_t columns)
      : query(RealMatrix::Zero(options.num_heads * options.head_dim, columns)),
        key(RealMatrix::Zero(options.num_kv_heads * options.head_dim, columns)),
        value(RealMatrix::Zero(options.num_kv_heads * options.head_dim, columns)),
        out(RealMatrix::Zero(options.embed_dim, options.num_heads * options.head_dim)) {}
  RealMatrix query, key, value, out;
};

MultiHeadAttention make_layer(const Context& context, const Context& host,
                              const LatentAttention& source,
                              const MultiHeadAttentionOptions& options, const HeadRows& rows) {
  MultiHeadAttention result = MultiHeadAttention::zeros(options);
  write_affine(host, result, "q_proj", rows.query);
  write_affine(host, result, "k_proj", rows.key);
  write_affine(host, result, "v_proj", rows.value);
  write_parameter(host, result, "out_proj.weight", rows.out);
  if (options.out_bias) {
    write_parameter(host, result, "out_proj.bias", read_parameter(host, source, "o_proj.bias"));
  }
  result.train(source.is_training());
  result.to(context);
  return result;
}

}  // namespace
}  // namespace convert

MultiHeadAttention to_mha(const Context& context, const LatentAttention& layer) {
  using namespace convert;
  check_device(Operation("to_mha", context), "layer", layer.device());
  const HostContext host(context);
  const LatentWeights weights("to_mha", host, layer);
  const LatentAttentionOptions& latent = layer.options();
  const std::int64_t dim = std::max(latent.nope_dim + latent.rope_dim, latent.value_dim);
  const auto options = multi_head_options(latent, latent.num_heads, dim);
  HeadRows rows(options, weights.latent.cols());
  for (std::int64_t h = 0; h < latent.num_heads; ++h) {
    set_head(rows.query, h, dim, weights.rope_query(h), weights.nope_query(h));
    set_head(rows.key, h, dim, weights.rope_key, times(host, weights.up_key(h), weights.latent));
    set_head(rows.value, h, dim, RealMatrix(0, weights.latent.cols()),
             times(host, weights.up_value(h), weights.latent));
    rows.out.middleCols(h * dim, latent.value_dim) = weights.out_columns(h);
  }
  return make_layer(context, host, layer, options, rows);
}

MultiHeadAttention to_mqa(const Context& context, const LatentAttention& layer) {
  using namespace convert;
  check_device(Operation("to_mqa", context), "layer", layer.device());
  const HostContext host(context);
  const LatentWeights weights("to_mqa", host, layer);
  const LatentAttentionOptions& latent = layer.options();
  const std::int64_t dim = latent.kv_rank + latent.rope_dim;
  MultiHeadAttentionOptions options = multi_head_options(latent, 1, dim);
  HeadRows rows(options, weights.latent.cols());
  for (std::int64_t h = 0; h < latent.num_heads; ++h) {
    set_head(rows.query, h, dim, weights.rope_query(h),
             times(host, weights.up_key(h).transpose(), weights.nope_query(h)));
    rows.out.middleCols(h * dim, latent.kv_rank) =
        times(host, weights.out_columns(h), weights.up_value(h));
  }
  set_head(rows.key, 0, dim, weights.rope_key, weights.latent);
  rows.value.topRows(latent.kv_rank) = weights.latent;
  return make_layer(context, host, layer, options, rows);
}

ConvertedLatent reduce_rank(const Context& context, const LatentAttention& layer,
                            std::int64_t kv_rank, const Calibration* calibration) {
  using namespace convert;
  constexpr std::string_view kOperation = "reduce_rank";
  check_device(Operation(kOperation, context), "layer", layer.device());
  const LatentAttentionOptions& source = layer.options();
  if (kv_rank < 0 || kv_rank > source.kv_rank) {
    fail(kOperation, "kv_rank",
         "got " + std::to_string(kv_rank) + ", expected 0 to " + std::to_string(source.kv_rank) +
             ", the layer's own");
  }
  if (source.kv_norm) refuse_norm(kOperation, "kv_norm");
  const HostContext host(context);
  require_finite(kOperation, host, layer);
  const RealMatrix inputs = input_moments(kOperation, host, calibration, source.embed_dim);
  const RealMatrix compress = read_affine(host, layer, "kv_a_proj_with_mqa");
  const RealMatrix latent = compress.topRows(source.kv_rank);
  const RealMatrix up = read_parameter(host, layer, "kv_b_proj.weight");

  // up latent = Q R latent: what is left is small, and its errors are those of keys and values.
  const ladon_eigen::HouseholderQR<RealMatrix> qr(up);
  const std::int64_t thin = std::min(up.rows(), up.cols());
  const RealMatrix basis = qr.householderQ() * RealMatrix::Identity(up.rows(), thin);
  const RealMatrix core =
      times(host, qr.matrixQR().topRows(thin).triangularView<ladon_eigen::Upper>(), latent);
  ConversionSummary summary{.cache_before = cache_elements(layer)};
  RealMatrix vectors;  // orthonormal columns that span what is kept of the core
  if (kv_rank == 0) {
    vectors = column_space(core);
  } else {
    const LowRank low =
        low_rank(host, second_moment(host, core, inputs), {}, std::min(kv_rank, thin));
    vectors = low.up;
    low.describe(summary);
  }
  const RealMatrix lower = times(host, vectors.transpose(), core);
  summary.exact =
      relative_residual(core, times(host, vectors, lower)) <= exact_tolerance(source.dtype);

  LatentAttentionOptions options = source;
  options.kv_rank = lower.rows();
  LatentAttention result = LatentAttention::zeros(options);
  for (const Parameter& parameter : layer.named_parameters()) {
    if (!parameter.name.starts_with("kv_")) copy_parameter(host, layer, result, parameter.name);
  }
  RealMatrix both(lower.rows() + source.rope_dim, compress.cols());
  both << lower, compress.bottomRows(source.rope_dim);
  write_affine(host, result, "kv_a_proj_with_mqa", both);
  write_parameter(host, result, "kv_b_proj.weight", times(host, basis, vectors));
  summary.cache_after = cache_elements(result);
  summary.head_order = heads_in_order(source.num_heads);
  result.train(layer.is_training());
  result.to(context);
  return {std::move(result), std::move(summary)};
}

}  // namespace ladon
