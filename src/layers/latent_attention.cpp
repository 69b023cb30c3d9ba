// Construction of LatentAttention: options checked and filled in, weights made.

#include "ladon/latent_attention.h"

#include <cmath>
#include <string>
#include <utility>

#include "core/checks.h"
#include "core/fail.h"
#include "ladon/random.h"

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

/// The factor that YaRN's longer context asks of the softmax's scale.
double yarn_scale(const RopeScalingOptions& scaling) {
  if (scaling.kind != RopeScaling::kYarn || scaling.mscale_all_dim == 0) return 1;
  const double mscale = yarn_mscale(scaling.factor, scaling.mscale_all_dim);
  return mscale * mscale;
}

LatentAttentionOptions complete(LatentAttentionOptions options) {
  options.validate();
  if (options.value_dim == 0) options.value_dim = options.nope_dim;
  if (!options.scale.has_value()) {
    const auto head_dim = static_cast<double>(options.nope_dim + options.rope_dim);
    const double yarn = options.rope_dim == 0 ? 1 : yarn_scale(options.rope.scaling);
    options.scale = yarn / std::sqrt(head_dim);
  }
  return options;
}

}  // namespace

void LatentAttentionOptions::validate() const {
  check_dimension("embed_dim", embed_dim, 1);
  check_dimension("num_heads", num_heads, 1);
  check_dimension("query_rank", query_rank, 0);
  check_dimension("kv_rank", kv_rank, 1);
  check_dimension("nope_dim", nope_dim, 1);
  check_dimension("rope_dim", rope_dim, 0);
  check_dimension("value_dim", value_dim, 0);
  if (rope_dim % 2 != 0) {
    fail(kOperation, "rope_dim",
         "got " + std::to_string(rope_dim) + ", expected an even number, or 0 for no rope");
  }
  const std::int64_t full = num_heads * (nope_dim + (value_dim == 0 ? nope_dim : value_dim));
  if (kv_rank >= full) {
    fail(kOperation, "kv_rank",
         "got " + std::to_string(kv_rank) + ", expected a latent smaller than the " +
             std::to_string(full) + " numbers of the keys and values that it stands for");
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
  // Refuses a base or a scaling that no call could use.
  if (rope_dim != 0) rope_frequencies(rope_dim, rope.base, rope.scaling);
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

LatentAttention::LatentAttention(const LatentAttentionOptions& options, std::uint64_t seed)
    : options_(complete(options)), identity_(std::make_shared<const char>()) {
  const auto add = [&](std::string name, const Dims& shape) -> Parameter& {
    return parameters_.emplace_back(
        Parameter::zeros_without_gradient(std::move(name), options_.dtype, shape));
  };
  // A stream for each projection, whether it is there or not.
  const auto add_projection = [&](const std::string& name, std::int64_t out, std::int64_t in,
                                  bool bias, std::uint64_t stream) {
    Parameter& weight = add(name + ".weight", {out, in});
    const double bound = std::sqrt(6.0 / (static_cast<double>(in) + static_cast<double>(out)));
    fill_uniform(weight.value, -bound, bound, seed, stream);
    if (bias) add(name + ".bias", {out});
  };
  const auto add_norm = [&](const std::string& name, std::int64_t dim) {
    fill_uniform(add(name + ".weight", {dim}).value, 1, 1, 0);
  };
  const std::int64_t query_width = options_.num_heads * head_dim();
  parameters_.reserve(11);
  if (options_.query_rank == 0) {
    add_projection("q_proj", query_width, options_.embed_dim, options_.query_bias, 0);
  } else {
    add_projection("q_a_proj", options_.query_rank, options_.embed_dim, options_.query_bias, 1);
    if (options_.query_norm) add_norm("q_a_layernorm", options_.query_rank);
    add_projection("q_b_proj", query_width, options_.query_rank, false, 2);
  }
  add_projection("kv_a_proj_with_mqa", latent_dim(), options_.embed_dim, options_.kv_bias, 3);
  if (options_.kv_norm) add_norm("kv_a_layernorm", options_.kv_rank);
  add_projection("kv_b_proj", options_.num_heads * (options_.nope_dim + options_.value_dim),
                 options_.kv_rank, false, 4);
  add_projection("o_proj", options_.embed_dim, options_.num_heads * options_.value_dim,
                 options_.out_bias, 5);
}

LatentAttention::~LatentAttention() = default;
LatentAttention::LatentAttention(LatentAttention&&) noexcept = default;
LatentAttention& LatentAttention::operator=(LatentAttention&&) noexcept = default;

LatentAttention::LatentAttention(const LatentAttention& other)
    : AttentionLayer(other), options_(other.options_), identity_(std::make_shared<const char>()) {}

LatentAttention& LatentAttention::operator=(const LatentAttention& other) {
  if (this == &other) return *this;
  LatentAttention fresh(other);
  *this = std::move(fresh);
  return *this;
}

LatentForm LatentAttention::form_for(std::int64_t query_len, std::int64_t kv_len) const noexcept {
  if (options_.form != LatentForm::kAuto) return options_.form;
  // Multiplications of one head. Both forms project queries, latents and the output alike.
  const auto queries = static_cast<double>(query_len);
  const auto keys = static_cast<double>(kv_len);
  const double pairs = queries * keys - (options_.causal ? queries * (queries - 1) / 2 : 0);
  const auto rank = static_cast<double>(options_.kv_rank);
  const auto rope_dim = static_cast<double>(options_.rope_dim);
  const auto expanded_dims = static_cast<double>(options_.nope_dim + options_.value_dim);
  const double expanded = keys * expanded_dims * rank + pairs * (expanded_dims + rope_dim);
  const double absorbed = queries * expanded_dims * rank + pairs * (2 * rank + rope_dim);
  return absorbed < expanded ? LatentForm::kAbsorbed : LatentForm::kExpanded;
}

KvCacheOptions LatentAttention::cache_options(std::int64_t batch,
                                              std::optional<DType> dtype) const {
  return {.batch = batch,
          .num_kv_heads = 1,
          .head_dim = latent_dim(),
          .value_dim = options_.kv_rank,
          .values_in_keys = true,
          .num_heads = options_.num_heads,
          .mha_dim = options_.nope_dim + options_.value_dim,
          .dtype = dtype.value_or(options_.dtype)};
}

}  // namespace ladon
