#include "options.h"

#include <string>
#include <utility>

namespace ladon::python {
namespace {

constexpr Names<Alignment, 2> kAlignments{
    {{"bottom_right", Alignment::kBottomRight}, {"top_left", Alignment::kTopLeft}}};
constexpr Names<RopeLayout, 2> kLayouts{
    {{"half_split", RopeLayout::kHalfSplit}, {"interleaved", RopeLayout::kInterleaved}}};
constexpr Names<RopeScaling, 6> kScalings{{{"none", RopeScaling::kNone},
                                           {"linear", RopeScaling::kLinear},
                                           {"llama3", RopeScaling::kLlama3},
                                           {"yarn", RopeScaling::kYarn},
                                           {"dynamic", RopeScaling::kDynamic},
                                           {"longrope", RopeScaling::kLongRope}}};
constexpr Names<QkNormSpan, 3> kNormSpans{{{"head", QkNormSpan::kHead},
                                           {"all_heads", QkNormSpan::kAllHeads},
                                           {"each_head", QkNormSpan::kEachHead}}};
constexpr Names<LatentForm, 3> kForms{{{"auto", LatentForm::kAuto},
                                       {"expanded", LatentForm::kExpanded},
                                       {"absorbed", LatentForm::kAbsorbed}}};

template <class Enum, std::size_t kCount>
nb::str text_of(const Names<Enum, kCount>& names, Enum value) {
  const std::string_view name = name_in(names, value);
  return nb::str(name.data(), name.size());
}

template <class T>
nb::object or_none(const std::optional<T>& value) {
  return value ? nb::cast(*value) : nb::none();
}

nb::list list_of(const std::vector<double>& numbers) {
  nb::list list;
  for (const double number : numbers) list.append(number);
  return list;
}

nb::object list_or_none(const std::vector<double>& values) {
  if (values.empty()) return nb::none();
  nb::list list = list_of(values);
  return list;
}

RopeScalingOptions to_scaling(nb::handle object, const Where& where) {
  if (!nb::isinstance<nb::dict>(object)) throw_type_error(where, object, "a dict");
  RopeScalingOptions options;
  Keywords keywords(where.operation, object);
  keywords.read("kind", options.kind, kScalings);
  keywords.read("factor", options.factor);
  keywords.read("original_context", options.original_context);
  keywords.read("low_frequency_factor", options.low_frequency_factor);
  keywords.read("high_frequency_factor", options.high_frequency_factor);
  keywords.read("beta_fast", options.beta_fast);
  keywords.read("beta_slow", options.beta_slow);
  keywords.read("truncate", options.truncate);
  keywords.read("attention_factor", options.attention_factor);
  keywords.read("mscale", options.mscale);
  keywords.read("mscale_all_dim", options.mscale_all_dim);
  keywords.read("context", options.context);
  keywords.read("short_factors", options.short_factors);
  keywords.read("long_factors", options.long_factors);
  keywords.finish();
  return options;
}

nb::dict scaling_dict(const RopeScalingOptions& options) {
  nb::dict dict;
  dict["kind"] = text_of(kScalings, options.kind);
  dict["factor"] = options.factor;
  dict["original_context"] = options.original_context;
  dict["low_frequency_factor"] = options.low_frequency_factor;
  dict["high_frequency_factor"] = options.high_frequency_factor;
  dict["beta_fast"] = options.beta_fast;
  dict["beta_slow"] = options.beta_slow;
  dict["truncate"] = options.truncate;
  dict["attention_factor"] = or_none(options.attention_factor);
  dict["mscale"] = options.mscale;
  dict["mscale_all_dim"] = options.mscale_all_dim;
  dict["context"] = options.context;
  dict["short_factors"] = list_of(options.short_factors);
  dict["long_factors"] = list_of(options.long_factors);
  return dict;
}

}  // namespace

void AttentionArguments::read(Keywords& keywords) {
  keywords.read("causal", options.causal);
  keywords.read("scale", options.scale);
  keywords.read("alignment", options.alignment, kAlignments);
  keywords.read("position_offset", options.position_offset);
  keywords.read("window_left", options.window_left);
  keywords.read("window_right", options.window_right);
  keywords.read("mask", mask);
  keywords.read("bias", bias);
  keywords.read("kv_lengths", kv_lengths);
  keywords.read("query_offsets", query_offsets);
  keywords.read("kv_offsets", kv_offsets);
  keywords.read("softcap", options.softcap);
  keywords.read_numbers("alibi_slopes", alibi_slopes);
  keywords.read_numbers("sinks", sinks);
  keywords.read("dropout", options.dropout.probability);
  keywords.read("dropout_seed", options.dropout.seed);
  keywords.read("dropout_first_sequence", options.dropout.first_sequence);
  keywords.read("dropout_first_head", options.dropout.first_head);
  keywords.read("dropout_first_query", options.dropout.first_query);
  keywords.read("dropout_first_key", options.dropout.first_key);
  options.mask = as_mask(mask.view());
  options.bias = as_rank_4(bias.view());
  options.alibi_slopes = alibi_slopes.view();
  options.sinks = sinks.view();
  options.kv_lengths = kv_lengths;
  options.query_offsets = query_offsets;
  options.kv_offsets = kv_offsets;
}

void AttentionArguments::follow(const Context& context) {
  alibi_slopes.follow(context);
  sinks.follow(context);
  options.alibi_slopes = alibi_slopes.view();
  options.sinks = sinks.view();
}

void PositionArgument::read(Keywords& keywords, const char* name) {
  const nb::handle object = keywords.take(name);
  if (!object.is_valid() || object.is_none()) return;
  if (nb::isinstance<nb::int_>(object) && !PyBool_Check(object.ptr())) {
    positions.first = to_integer(object, keywords.where(name));
    return;
  }
  list = to_integers(object, keywords.where(name));
  positions.explicit_positions = list;
}

void read_rope(Keywords& keywords, RopeOptions& options) {
  keywords.read("layout", options.layout, kLayouts);
  keywords.read("rotary_dim", options.rotary_dim);
  keywords.read("base", options.base);
  const nb::handle scaling = keywords.take("scaling");
  if (scaling.is_valid() && !scaling.is_none()) {
    options.scaling = to_scaling(scaling, keywords.where("scaling"));
  }
  keywords.read("frequencies", options.frequencies);
  keywords.read("magnitude", options.magnitude);
}

RopeOptions to_rope(nb::handle object, const Where& where, RopeOptions options) {
  if (!nb::isinstance<nb::dict>(object)) {
    throw_type_error(where, object,
                     "a dict of layout, rotary_dim, base, scaling, frequencies and magnitude");
  }
  Keywords keywords(where.operation, object);
  read_rope(keywords, options);
  keywords.finish();
  return options;
}

nb::dict rope_dict(const RopeOptions& options) {
  nb::dict dict;
  dict["layout"] = text_of(kLayouts, options.layout);
  dict["rotary_dim"] = options.rotary_dim;
  dict["base"] = options.base;
  dict["scaling"] = scaling_dict(options.scaling);
  dict["frequencies"] = list_or_none(options.frequencies);
  dict["magnitude"] = options.magnitude;
  return dict;
}

MultiHeadAttentionOptions to_multi_head_options(Keywords& keywords) {
  MultiHeadAttentionOptions options;
  keywords.read("embed_dim", options.embed_dim);
  keywords.read("num_heads", options.num_heads);
  keywords.read("num_kv_heads", options.num_kv_heads);
  keywords.read("head_dim", options.head_dim);
  keywords.read("key_dim", options.key_dim);
  keywords.read("value_input_dim", options.value_input_dim);
  keywords.read("query_bias", options.query_bias);
  keywords.read("key_bias", options.key_bias);
  keywords.read("value_bias", options.value_bias);
  keywords.read("out_bias", options.out_bias);
  keywords.read("causal", options.causal);
  const nb::handle rope = keywords.take("rope");
  if (rope.is_valid() && !rope.is_none()) {
    options.rope = to_rope(rope, keywords.where("rope"), RopeOptions{});
  }
  keywords.read("qk_norm", options.qk_norm);
  keywords.read("qk_norm_epsilon", options.qk_norm_epsilon);
  keywords.read("qk_norm_span", options.qk_norm_span, kNormSpans);
  keywords.read("qk_norm_offset", options.qk_norm_offset);
  keywords.read("qk_norm_centered", options.qk_norm_centered);
  keywords.read("scale", options.scale);
  keywords.read("softcap", options.softcap);
  keywords.read("window_left", options.window_left);
  keywords.read("window_right", options.window_right);
  keywords.read("alibi_slopes", options.alibi_slopes);
  keywords.read("sinks", options.sinks);
  keywords.read("dropout", options.dropout);
  keywords.read("dtype", options.dtype);
  return options;
}

nb::dict options_dict(const MultiHeadAttentionOptions& options) {
  nb::dict dict;
  dict["embed_dim"] = options.embed_dim;
  dict["num_heads"] = options.num_heads;
  dict["num_kv_heads"] = options.num_kv_heads;
  dict["head_dim"] = options.head_dim;
  dict["key_dim"] = options.key_dim;
  dict["value_input_dim"] = options.value_input_dim;
  dict["query_bias"] = options.query_bias;
  dict["key_bias"] = options.key_bias;
  dict["value_bias"] = options.value_bias;
  dict["out_bias"] = options.out_bias;
  dict["causal"] = options.causal;
  dict["rope"] = options.rope ? nb::object(rope_dict(*options.rope)) : nb::none();
  dict["qk_norm"] = options.qk_norm;
  dict["qk_norm_epsilon"] = options.qk_norm_epsilon;
  dict["qk_norm_span"] = text_of(kNormSpans, options.qk_norm_span);
  dict["qk_norm_offset"] = options.qk_norm_offset;
  dict["qk_norm_centered"] = options.qk_norm_centered;
  dict["scale"] = or_none(options.scale);
  dict["softcap"] = options.softcap;
  dict["window_left"] = or_none(options.window_left);
  dict["window_right"] = or_none(options.window_right);
  dict["alibi_slopes"] = list_or_none(options.alibi_slopes);
  dict["sinks"] = options.sinks;
  dict["dropout"] = options.dropout;
  dict["dtype"] = name_of(options.dtype);
  return dict;
}

LatentAttentionOptions to_latent_options(Keywords& keywords) {
  LatentAttentionOptions options;
  keywords.read("embed_dim", options.embed_dim);
  keywords.read("num_heads", options.num_heads);
  keywords.read("query_rank", options.query_rank);
  keywords.read("kv_rank", options.kv_rank);
  keywords.read("nope_dim", options.nope_dim);
  keywords.read("rope_dim", options.rope_dim);
  keywords.read("value_dim", options.value_dim);
  keywords.read("query_bias", options.query_bias);
  keywords.read("kv_bias", options.kv_bias);
  keywords.read("out_bias", options.out_bias);
  keywords.read("query_norm", options.query_norm);
  keywords.read("kv_norm", options.kv_norm);
  keywords.read("norm_epsilon", options.norm_epsilon);
  keywords.read("causal", options.causal);
  const nb::handle rope = keywords.take("rope");
  if (rope.is_valid() && !rope.is_none()) {
    options.rope = to_rope(rope, keywords.where("rope"), options.rope);
  }
  keywords.read("scale", options.scale);
  keywords.read("dropout", options.dropout);
  keywords.read("form", options.form, kForms);
  keywords.read("dtype", options.dtype);
  return options;
}

nb::dict options_dict(const LatentAttentionOptions& options) {
  nb::dict dict;
  dict["embed_dim"] = options.embed_dim;
  dict["num_heads"] = options.num_heads;
  dict["query_rank"] = options.query_rank;
  dict["kv_rank"] = options.kv_rank;
  dict["nope_dim"] = options.nope_dim;
  dict["rope_dim"] = options.rope_dim;
  dict["value_dim"] = options.value_dim;
  dict["query_bias"] = options.query_bias;
  dict["kv_bias"] = options.kv_bias;
  dict["out_bias"] = options.out_bias;
  dict["query_norm"] = options.query_norm;
  dict["kv_norm"] = options.kv_norm;
  dict["norm_epsilon"] = options.norm_epsilon;
  dict["causal"] = options.causal;
  dict["rope"] = rope_dict(options.rope);
  dict["scale"] = or_none(options.scale);
  dict["dropout"] = options.dropout;
  dict["form"] = text_of(kForms, options.form);
  dict["dtype"] = name_of(options.dtype);
  return dict;
}

LoadOptions to_load_options(Keywords& keywords) {
  LoadOptions options;
  keywords.read("dtype", options.dtype);
  keywords.read("ignored_fields", options.ignored_fields);
  keywords.read("rope_context", options.rope_context);
  return options;
}

void read_cache_options(Keywords& keywords, KvCacheOptions& options) {
  keywords.read("batch", options.batch);
  keywords.read("num_kv_heads", options.num_kv_heads);
  keywords.read("head_dim", options.head_dim);
  keywords.read("value_dim", options.value_dim);
  keywords.read("values_in_keys", options.values_in_keys);
  keywords.read("num_heads", options.num_heads);
  keywords.read("mha_dim", options.mha_dim);
  keywords.read("dtype", options.format);
}

nb::dict options_dict(const KvCacheOptions& options, DeviceId device) {
  nb::dict dict;
  dict["batch"] = options.batch;
  dict["num_kv_heads"] = options.num_kv_heads;
  dict["head_dim"] = options.head_dim;
  dict["value_dim"] = options.value_dim;
  dict["values_in_keys"] = options.values_in_keys;
  dict["num_heads"] = options.num_heads;
  dict["mha_dim"] = options.mha_dim;
  dict["dtype"] = name_of(options.format.dtype);
  if (!device.is_cpu()) dict["device"] = device.to_string();
  return dict;
}

void LayerArguments::read(Keywords& keywords) {
  keywords.read("causal", causal);
  keywords.read("mask", mask);
  keywords.read("bias", bias);
  keywords.read("kv_lengths", kv_lengths);
  keywords.read("new_lengths", new_lengths);
  keywords.read("query", query);
  query_positions.read(keywords, "query_positions");
  key_positions.read(keywords, "key_positions");
  keywords.read("dropout_seed", dropout_seed);
}

LayerCall LayerArguments::call() const {
  return {.causal = causal,
          .mask = as_mask(mask.view()),
          .bias = as_rank_4(bias.view()),
          .kv_lengths = kv_lengths,
          .query_positions = query_positions.positions,
          .key_positions = key_positions.positions,
          .dropout_seed = dropout_seed,
          .weights = {}};
}

CachedCall LayerArguments::cached_call() const {
  return {.causal = causal,
          .new_lengths = new_lengths,
          .mask = as_mask(mask.view()),
          .bias = as_rank_4(bias.view()),
          .query = query.view(),
          .query_positions = query_positions.list};
}

void LayerArguments::refuse(const Keywords& keywords, bool cached) const {
  const auto refuse_one = [&](const char* name, bool given) {
    if (!given) return;
    throw_value_error(
        keywords.where(name),
        cached ? "got it together with a cache, expected it left out: the cache has its own "
                 "lengths and positions"
               : "got it without a cache, expected it left out");
  };
  if (!cached) {
    refuse_one("query", !query.absent());
    return refuse_one("new_lengths", !new_lengths.empty());
  }
  refuse_one("kv_lengths", !kv_lengths.empty());
  refuse_one("key_positions", !key_positions.list.empty() || key_positions.positions.first != 0);
  if (query_positions.positions.first != 0) {
    throw_value_error(
        keywords.where("query_positions"),
        "got a number together with a cache, expected a position for each token of x");
  }
}

}  // namespace ladon::python
