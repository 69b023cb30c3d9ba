// Layers with outliers in a few channels, for the tests of balance_channels().
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "convert/convert_support.h"
#include "ladon/alibi.h"

namespace ladon::test::balance {

constexpr std::int64_t kEmbed = 24;
constexpr std::int64_t kDim = 12;

/// 4 query heads on 2 KV heads.
inline MultiHeadAttentionOptions options_of() {
  return {.embed_dim = kEmbed,
          .num_heads = 4,
          .num_kv_heads = 2,
          .head_dim = kDim,
          .causal = true,
          .dtype = DType::kF64};
}

struct Variant {
  std::string name;
  MultiHeadAttentionOptions options;
};

inline std::vector<Variant> variants() {
  using Options = MultiHeadAttentionOptions;
  std::vector<Variant> all;
  const auto add = [&](std::string name, auto&& change) {
    Options options = options_of();
    change(options);
    all.push_back({std::move(name), options});
  };
  add("half-split, biases", [](Options& o) {
    o.rope = RopeOptions{};
    o.query_bias = o.key_bias = o.value_bias = o.out_bias = true;
  });
  add("interleaved, key bias", [](Options& o) {
    o.rope = RopeOptions{.layout = RopeLayout::kInterleaved};
    o.key_bias = true;
  });
  add("partial, MQA, value bias", [](Options& o) {
    o.rope = RopeOptions{.rotary_dim = 8};
    o.num_kv_heads = 1;
    o.value_bias = true;
  });
  add("partial, interleaved, MHA", [](Options& o) {
    o.rope = RopeOptions{.layout = RopeLayout::kInterleaved, .rotary_dim = 4};
    o.num_kv_heads = 4;
  });
  add("no rope, sinks, softcap, ALiBi, window", [](Options& o) {
    o.sinks = true;
    o.softcap = 5;
    o.alibi_slopes = alibi_slopes(4);
    o.window_left = 6;
  });
  for (const QkNormSpan span : {QkNormSpan::kHead, QkNormSpan::kAllHeads, QkNormSpan::kEachHead}) {
    add("norm, span " + std::to_string(static_cast<int>(span)), [&](Options& o) {
      o.rope = RopeOptions{};
      o.qk_norm = true;
      o.qk_norm_span = span;
      o.qk_norm_centered = span == QkNormSpan::kEachHead;
      o.key_bias = true;
    });
  }
  return all;
}

/// Multiplies channels of a projection, or of a norm.
inline void multiply_channels(AttentionLayer& layer, const std::string& name,
                              const std::vector<std::int64_t>& channels, double factor) {
  for (const std::string& parameter : {name + ".weight", name + ".bias"}) {
    if (!layer.has_parameter(parameter)) continue;
    Parameter& changed = layer.parameter(parameter);
    const bool is_projection = name.ends_with("_proj") && changed.value.rank() == 2;
    const std::int64_t columns = is_projection ? changed.value.size(1) : 1;
    for (const std::int64_t channel : channels) {
      double* const row = changed.value.data_as<double>() + channel * columns;
      for (std::int64_t c = 0; c < columns; ++c) row[c] *= factor;
    }
  }
}

/// Weights with outliers: the first head's key channel 3 and value channels 0, 2, 5 and 7.
inline MultiHeadAttention with_outliers(const MultiHeadAttentionOptions& options) {
  auto layer = random_layer(MultiHeadAttention(options), 1);
  if (options.qk_norm) {
    multiply_channels(layer, "k_norm", {3}, 100);  // it is small as drawn
  } else {
    multiply_channels(layer, "k_proj", {3}, 20);
  }
  multiply_channels(layer, "v_proj", {0, 2, 5, 7}, 10);
  return layer;
}

inline MultiHeadAttention in_dtype(const MultiHeadAttention& layer, DType dtype) {
  MultiHeadAttentionOptions options = layer.options();
  options.dtype = dtype;
  MultiHeadAttention result = MultiHeadAttention::zeros(options);
  for (const Parameter& parameter : layer.named_parameters()) {
    result.set_parameter(host_context(), parameter.name, parameter.value);
  }
  return result;
}

inline std::string bits_of(const Tensor& tensor) {
  return {static_cast<const char*>(tensor.data()),
          static_cast<std::size_t>(tensor.num_elements()) * size_of(tensor.dtype())};
}

}  // namespace ladon::test::balance
