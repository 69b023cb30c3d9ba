// Construction of LatentAttention: options checked and filled in, weights made.

#include "ladon/latent_attention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <utility>

#include "core/checks.h"
#include "core/fail.h"
#include "layers/latent_steps.h"
#include "layers/layer_weights.h"

namespace ladon {
namespace {

constexpr std::string_view kOperation = "LatentAttention";

void check_dimension(std::string_view name, std::int64_t value, std::int64_t least) {
  // Products of three of them must fit 64 bits.
  constexpr std::int64_t kMost = std::int64_t{1} << 20;
  if (value < least || value > kMost) {
    fail(kOperation, name,
         "got " + std::to_string(value) + ", expected " + std::to_string(least) + " to " +
             std::to_string(kMost));
  }
}

std::int64_t value_dim_of(const LatentAttentionOptions& options) {
  if (options.value_dim != 0) return options.value_dim;
  return options.nope_dim != 0 ? options.nope_dim : options.rope_dim;
}

/// The factor that YaRN's longer context asks of the softmax's scale.
double yarn_scale(const RopeScalingOptions& scaling) {
  if (scaling.kind != RopeScaling::kYarn || scaling.mscale_all_dim == 0) return 1;
  const double mscale = yarn_mscale(scaling.factor, scaling.mscale_all_dim);
  return mscale * mscale;
}

/// Each weight draws from its own stream, so that another width or bias elsewhere leaves it as it
/// was.
std::uint64_t stream_of(std::string_view weight) {
  constexpr std::array<std::string_view, 6> kWeights = {
      "q_proj.weight",    "q_a_proj.weight", "q_b_proj.weight", "kv_a_proj_with_mqa.weight",
      "kv_b_proj.weight", "o_proj.weight"};
  return static_cast<std::uint64_t>(std::find(kWeights.begin(), kWeights.end(), weight) -
                                    kWeights.begin());
}

}  // namespace

void LatentAttentionOptions::validate() const {
  check_dimension("embed_dim", embed_dim, 1);
  check_dimension("num_heads", num_heads, 1);
  check_dimension("query_rank", query_rank, 0);
  check_dimension("kv_rank", kv_rank, 1);
  check_dimension("rope_dim", rope_dim, 0);
  check_dimension("nope_dim", nope_dim, rope_dim == 0 ? 1 : 0);
  check_dimension("value_dim", value_dim, 0);
  if (rope_dim % 2 != 0) {
    fail(kOperation, "rope_dim",
         "got " + std::to_string(rope_dim) + ", expected an even number, or 0 for no rope");
  }
  const std::int64_t full = num_heads * (nope_dim + value_dim_of(*this));
  if (kv_rank >= full) {
    fail(kOperation, "kv_rank",
         "got " + std::to_string(kv_rank) + ", expected a latent smaller than the " +
             std::to_string(full) + " elements of the keys and values that it stands for");
  }
  if ((query_norm || kv_norm) && !(norm_epsilon > 0 && std::isfinite(norm_epsilon))) {
    fail(kOperation, "norm_epsilon",
         "got " + text_of(norm_epsilon) + ", expected a positive number");
  }
  if (rope.rotary_dim != 0) {
    fail(kOperation, "rope.rotary_dim",
         "got " + std::to_string(rope.rotary_dim) + ", expected 0 because rope_dim says it");
  }
  if (rope.layout != RopeLayout::kHalfSplit && rope.layout != RopeLayout::kInterleaved) {
    fail(kOperation, "rope.layout",
         "got " + std::to_string(static_cast<int>(rope.layout)) + ", expected a RopeLayout");
  }
  // Refuses frequencies that no call could use.
  if (rope_dim != 0) {
    as_part_of(
        kOperation, [&] { rope_frequencies(rope, rope_dim); }, "rope.");
  } else if (!rope.frequencies.empty()) {
    fail(kOperation, "rope.frequencies",
         "got " + std::to_string(rope.frequencies.size()) + " of them, expected none because " +
             "rope_dim is 0");
  }
  if (scale.has_value()) check_finite(kOperation, "scale", *scale);
  if (!(dropout >= 0 && dropout < 1)) {
    fail(kOperation, "dropout", "got " + text_of(dropout) + ", expected a number in [0, 1)");
  }
  if (form != LatentForm::kAuto && form != LatentForm::kExpanded && form != LatentForm::kAbsorbed) {
    fail(kOperation, "form",
         "got " + std::to_string(static_cast<int>(form)) + ", expected a LatentForm");
  }
  if (!is_float(dtype)) {
    fail(kOperation, "dtype",
         std::string("got ") + name_of(dtype) + ", expected f64, f32, f16 or bf16");
  }
}

LatentAttentionOptions latent::complete_options(LatentAttentionOptions options) {
  options.validate();
  options.value_dim = value_dim_of(options);
  if (!options.scale.has_value()) {
    const auto head_dim = static_cast<double>(options.nope_dim + options.rope_dim);
    const double yarn = options.rope_dim == 0 ? 1 : yarn_scale(options.rope.scaling);
    options.scale = yarn / std::sqrt(head_dim);
  }
  return options;
}

std::vector<latent::ParameterPlan> latent::plan_parameters(const LatentAttentionOptions& options) {
  std::vector<ParameterPlan> plan;
  const auto add_projection = [&](const std::string& name, std::int64_t out, std::int64_t in,
                                  bool bias) {
    plan.push_back({name + ".weight", {out, in}});
    if (bias) plan.push_back({name + ".bias", {out}});
  };
  const std::int64_t query_width = options.num_heads * (options.nope_dim + options.rope_dim);
  if (options.query_rank == 0) {
    add_projection("q_proj", query_width, options.embed_dim, options.query_bias);
  } else {
    add_projection("q_a_proj", options.query_rank, options.embed_dim, options.query_bias);
    if (options.query_norm) plan.push_back({"q_a_layernorm.weight", {options.query_rank}});
    add_projection("q_b_proj", query_width, options.query_rank, false);
  }
  add_projection("kv_a_proj_with_mqa", options.kv_rank + options.rope_dim, options.embed_dim,
                 options.kv_bias);
  if (options.kv_norm) plan.push_back({"kv_a_layernorm.weight", {options.kv_rank}});
  add_projection("kv_b_proj", options.num_heads * (options.nope_dim + options.value_dim),
                 options.kv_rank, false);
  add_projection("o_proj", options.embed_dim, options.num_heads * options.value_dim,
                 options.out_bias);
  return plan;
}

LatentAttention::LatentAttention(const LatentAttentionOptions& options, std::uint64_t seed)
    : LatentAttention(options, std::optional(seed)) {}

LatentAttention LatentAttention::zeros(const LatentAttentionOptions& options) {
  return {options, std::nullopt};
}

LatentAttention::LatentAttention(const LatentAttentionOptions& options,
                                 std::optional<std::uint64_t> seed)
    : options_(latent::complete_options(options)), identity_(std::make_shared<const char>()) {
  for (const auto& [name, shape] : latent::plan_parameters(options_)) {
    Parameter& made =
        parameters_.emplace_back(Parameter::zeros_without_gradient(name, options_.dtype, shape));
    if (name.ends_with("_layernorm.weight")) {
      fill_weight(made, 1, 1);
    } else if (seed && shape.rank() == 2) {
      const double sum = static_cast<double>(shape[0]) + static_cast<double>(shape[1]);
      const double bound = std::sqrt(6.0 / sum);
      fill_weight(made, -bound, bound, *seed, stream_of(name));
    }
  }
  plan_ = std::make_shared<const Plan>(options_, parameters_);
}

LatentAttention::~LatentAttention() = default;
LatentAttention::LatentAttention(LatentAttention&&) noexcept = default;
LatentAttention& LatentAttention::operator=(LatentAttention&&) noexcept = default;

LatentAttention::LatentAttention(const LatentAttention& other)
    : AttentionLayer(other),
      options_(other.options_),
      plan_(other.plan_),
      identity_(std::make_shared<const char>()) {}

LatentAttention& LatentAttention::operator=(const LatentAttention& other) {
  if (this == &other) return *this;
  LatentAttention fresh(other);
  *this = std::move(fresh);
  return *this;
}

LatentForm LatentAttention::form_for(std::int64_t query_len, std::int64_t kv_len) const noexcept {
  return latent::LatentHeads(*this).form_for(query_len, kv_len);
}

LatentForm latent::LatentHeads::form_for(std::int64_t query_len,
                                         std::int64_t kv_len) const noexcept {
  if (options.form != LatentForm::kAuto) return options.form;
  // Multiplications of one head. Both forms project queries, latents and the output alike.
  const auto queries = static_cast<double>(query_len);
  const auto keys = static_cast<double>(kv_len);
  const double pairs = queries * keys - (options.causal ? queries * (queries - 1) / 2 : 0);
  const auto rank = static_cast<double>(options.kv_rank);
  const auto rope_dim = static_cast<double>(options.rope_dim);
  const auto expanded_dims = static_cast<double>(options.nope_dim + options.value_dim);
  const double expanded = keys * expanded_dims * rank + pairs * (expanded_dims + rope_dim);
  const double absorbed = queries * expanded_dims * rank + pairs * (2 * rank + rope_dim);
  return absorbed < expanded ? LatentForm::kAbsorbed : LatentForm::kExpanded;
}

KvCacheOptions LatentAttention::cache_options(std::int64_t batch,
                                              std::optional<KvFormat> format) const {
  return latent::cache_options(options_, batch, format);
}

KvCacheOptions latent::cache_options(const LatentAttentionOptions& options, std::int64_t batch,
                                     std::optional<KvFormat> format) {
  return {.batch = batch,
          .num_kv_heads = 1,
          .head_dim = options.kv_rank + options.rope_dim,
          .value_dim = options.kv_rank,
          .values_in_keys = true,
          .num_heads = options.num_heads,
          .mha_dim = options.nope_dim + options.value_dim,
          .format = format.value_or(options.dtype)};
}

}  // namespace ladon
