// Construction: options checked and filled in, weights made.

#include "ladon/multi_head_attention.h"

#include <cmath>
#include <string>
#include <utility>

#include "core/checks.h"
#include "core/fail.h"
#include "layers/layer_weights.h"
#include "layers/multi_head.h"

namespace ladon {
namespace {

constexpr std::string_view kOperation = "MultiHeadAttention";

void check_positive(std::string_view argument, std::int64_t value) {
  if (value <= 0) {
    fail(kOperation, argument, "got " + std::to_string(value) + ", expected 1 or more");
  }
}

void check_not_negative(std::string_view argument, std::int64_t value) {
  if (value < 0) {
    fail(kOperation, argument, "got " + std::to_string(value) + ", expected 0 or more");
  }
}

void check_rope(const MultiHeadAttentionOptions& options) {
  const std::int64_t rotary_dim = options.rope->rotary_dim;
  if (rotary_dim < 0 || rotary_dim > options.head_dim || rotary_dim % 2 != 0) {
    fail(kOperation, "rope.rotary_dim",
         "got " + std::to_string(rotary_dim) + ", expected an even number up to head_dim = " +
             std::to_string(options.head_dim) + ", or 0 for all of it");
  }
  if (rotary_dim == 0 && options.head_dim % 2 != 0) {
    fail(kOperation, "rope.rotary_dim",
         "got 0 for all of a head_dim of " + std::to_string(options.head_dim) +
             ", expected an even number");
  }
  if (options.rope->layout != RopeLayout::kHalfSplit &&
      options.rope->layout != RopeLayout::kInterleaved) {
    fail(kOperation, "rope.layout",
         "got " + std::to_string(static_cast<int>(options.rope->layout)) +
             ", expected a RopeLayout");
  }
  // Refuses frequencies that no call could use.
  as_part_of(
      kOperation, [&] { rope_frequencies(*options.rope, options.head_dim); }, "rope.");
}

void check_numbers(const MultiHeadAttentionOptions& options) {
  if (!(options.dropout >= 0 && options.dropout < 1)) {
    fail(kOperation, "dropout",
         "got " + text_of(options.dropout) + ", expected a number in [0, 1)");
  }
  if (options.scale.has_value()) check_finite(kOperation, "scale", *options.scale);
  check_finite(kOperation, "softcap", options.softcap);
  if (options.softcap < 0) {
    fail(kOperation, "softcap",
         "got " + text_of(options.softcap) + ", expected a positive number, or 0 for none");
  }
  if (!options.alibi_slopes.empty() &&
      std::cmp_not_equal(options.alibi_slopes.size(), options.num_heads)) {
    fail(kOperation, "alibi_slopes",
         "got " + std::to_string(options.alibi_slopes.size()) +
             " of them, expected one for each of " + std::to_string(options.num_heads) +
             " heads, or none");
  }
  for (const double slope : options.alibi_slopes) check_finite(kOperation, "alibi_slopes", slope);
  check_not_negative("window_left", options.window_left.value_or(0));
  check_not_negative("window_right", options.window_right.value_or(0));
  if (options.qk_norm && !(options.qk_norm_epsilon > 0 && std::isfinite(options.qk_norm_epsilon))) {
    fail(kOperation, "qk_norm_epsilon",
         "got " + text_of(options.qk_norm_epsilon) + ", expected a positive number");
  }
  check_finite(kOperation, "qk_norm_offset", options.qk_norm_offset);
  if (options.qk_norm_span > QkNormSpan::kEachHead) {
    fail(kOperation, "qk_norm_span",
         "got " + std::to_string(static_cast<int>(options.qk_norm_span)) +
             ", expected a QkNormSpan");
  }
  if (!is_float(options.dtype)) {
    fail(kOperation, "dtype",
         std::string("got ") + name_of(options.dtype) + ", expected f64, f32, f16 or bf16");
  }
}

}  // namespace

MultiHeadAttentionOptions multi_head::complete_options(MultiHeadAttentionOptions options) {
  check_positive("embed_dim", options.embed_dim);
  check_positive("num_heads", options.num_heads);
  check_not_negative("num_kv_heads", options.num_kv_heads);
  check_not_negative("head_dim", options.head_dim);
  check_not_negative("key_dim", options.key_dim);
  check_not_negative("value_input_dim", options.value_input_dim);
  if (options.num_kv_heads == 0) options.num_kv_heads = options.num_heads;
  if (options.num_kv_heads > options.num_heads || options.num_heads % options.num_kv_heads != 0) {
    fail(kOperation, "num_kv_heads",
         "got " + std::to_string(options.num_kv_heads) +
             ", expected a divisor of num_heads = " + std::to_string(options.num_heads));
  }
  if (options.head_dim == 0) {
    if (options.embed_dim % options.num_heads != 0) {
      fail(kOperation, "num_heads",
           "got " + std::to_string(options.num_heads) + ", expected a divisor of embed_dim = " +
               std::to_string(options.embed_dim) + " because head_dim is not given");
    }
    options.head_dim = options.embed_dim / options.num_heads;
  }
  if (options.key_dim == 0) options.key_dim = options.embed_dim;
  if (options.value_input_dim == 0) options.value_input_dim = options.key_dim;
  std::int64_t width = 0;
  if (__builtin_mul_overflow(options.num_heads, options.head_dim, &width)) {
    fail(kOperation, "head_dim",
         "got " + std::to_string(options.head_dim) + " with " + std::to_string(options.num_heads) +
             " heads, expected a width that fits 64 bits");
  }
  if (options.rope.has_value()) check_rope(options);
  check_numbers(options);
  return options;
}

MultiHeadAttention::MultiHeadAttention(const MultiHeadAttentionOptions& options, std::uint64_t seed)
    : MultiHeadAttention(options, std::optional(seed)) {}

MultiHeadAttention MultiHeadAttention::zeros(const MultiHeadAttentionOptions& options) {
  return {options, std::nullopt};
}

MultiHeadAttention::MultiHeadAttention(const MultiHeadAttentionOptions& options,
                                       std::optional<std::uint64_t> seed)
    : options_(multi_head::complete_options(options)), identity_(std::make_shared<const char>()) {
  const std::int64_t query_width = options_.num_heads * options_.head_dim;
  const std::int64_t kv_width = options_.num_kv_heads * options_.head_dim;
  const auto add = [&](std::string name, const Dims& shape) -> Parameter& {
    return parameters_.emplace_back(
        Parameter::zeros_without_gradient(std::move(name), options_.dtype, shape));
  };
  // Each projection draws from its own stream, so that switching a bias on, or another width of one
  // projection, leaves the others' weights as they were.
  std::uint64_t stream = 0;
  const auto add_projection = [&](const std::string& name, std::int64_t out, std::int64_t in,
                                  bool bias) {
    Parameter& weight = add(name + ".weight", {out, in});
    const double bound = std::sqrt(6.0 / (static_cast<double>(in) + static_cast<double>(out)));
    if (seed) fill_weight(weight, -bound, bound, *seed, stream++);
    if (bias) add(name + ".bias", {out});
  };
  parameters_.reserve(11);
  add_projection("q_proj", query_width, options_.embed_dim, options_.query_bias);
  add_projection("k_proj", kv_width, options_.key_dim, options_.key_bias);
  add_projection("v_proj", kv_width, options_.value_input_dim, options_.value_bias);
  add_projection("out_proj", options_.embed_dim, query_width, options_.out_bias);
  if (options_.qk_norm) {
    const double unit = 1 - options_.qk_norm_offset;
    fill_weight(add("q_norm.weight", multi_head::norm_shape(options_, options_.num_heads)), unit,
                unit);
    fill_weight(add("k_norm.weight", multi_head::norm_shape(options_, options_.num_kv_heads)), unit,
                unit);
  }
  if (options_.sinks) add("sinks", {options_.num_heads});
  if (!options_.alibi_slopes.empty()) {
    alibi_slopes_ = Tensor::from_values(DType::kF64, {options_.num_heads}, options_.alibi_slopes);
  }
  plan_ = std::make_shared<const Plan>(options_, parameters_);
}

MultiHeadAttention::~MultiHeadAttention() = default;
MultiHeadAttention::MultiHeadAttention(MultiHeadAttention&&) noexcept = default;
MultiHeadAttention& MultiHeadAttention::operator=(MultiHeadAttention&&) noexcept = default;

MultiHeadAttention::MultiHeadAttention(const MultiHeadAttention& other)
    : AttentionLayer(other),
      options_(other.options_),
      alibi_slopes_(other.alibi_slopes_.clone()),
      plan_(other.plan_),
      identity_(std::make_shared<const char>()) {}

MultiHeadAttention& MultiHeadAttention::operator=(const MultiHeadAttention& other) {
  if (this == &other) return *this;
  MultiHeadAttention fresh(other);
  *this = std::move(fresh);
  return *this;
}

void MultiHeadAttention::to(const Context& context) {
  Tensor slopes = alibi_slopes_.to(context);
  AttentionLayer::to(context);
  alibi_slopes_ = std::move(slopes);
}

MultiHeadAttention MultiHeadAttention::mha(std::int64_t embed_dim, std::int64_t num_heads,
                                           std::uint64_t seed) {
  return MultiHeadAttention({.embed_dim = embed_dim, .num_heads = num_heads}, seed);
}

MultiHeadAttention MultiHeadAttention::mqa(std::int64_t embed_dim, std::int64_t num_heads,
                                           std::uint64_t seed) {
  return gqa(embed_dim, num_heads, 1, seed);
}

MultiHeadAttention MultiHeadAttention::gqa(std::int64_t embed_dim, std::int64_t num_heads,
                                           std::int64_t num_kv_heads, std::uint64_t seed) {
  // Here 0 is a mistake, not a default.
  check_positive("num_kv_heads", num_kv_heads);
  return MultiHeadAttention(
      {.embed_dim = embed_dim, .num_heads = num_heads, .num_kv_heads = num_kv_heads}, seed);
}

}  // namespace ladon
