#include "models/family_case_parts.h"

#include <cmath>
#include <utility>

namespace ladon::test {
namespace {

PlainAttention sized(const Sizes& sizes) {
  PlainAttention plain;
  plain.num_heads = sizes.heads;
  plain.num_kv_heads = sizes.kv_heads;
  plain.head_dim = sizes.head_dim;
  plain.out_width = sizes.embed;
  plain.scale = 1 / std::sqrt(sizes.head_dim);
  return plain;
}

}  // namespace

void add_linear(TensorMap& tensors, TensorMaker& maker, const std::string& name, const Dims& shape,
                int in, int bias_size) {
  tensors.emplace(name + ".weight", maker.make(shape, 1.4 / std::sqrt(in)));
  if (bias_size > 0) tensors.emplace(name + ".bias", maker.make({bias_size}, 0.4));
}

PlainLinear linear_of(const TensorMap& tensors, const std::string& name, bool transposed) {
  return {tensor_at(tensors, name + ".weight"), find_tensor(tensors, name + ".bias"), transposed};
}

std::string layer_prefix(const std::string& prefix, int layer) {
  std::string result = prefix;
  return result.replace(result.find('%'), 1, std::to_string(layer));
}

FamilyCase separate_case(FamilyCase setup, const Sizes& sizes, bool qkv_bias, bool out_bias,
                         const Finish& finish, const Names& names) {
  TensorMaker maker(7);
  setup.embed_dim = sizes.embed;
  const int query_width = sizes.heads * sizes.head_dim;
  const int kv_width = sizes.kv_heads * sizes.head_dim;
  for (int layer = 0; layer < setup.num_layers; ++layer) {
    const std::string prefix = layer_prefix(setup.prefix_in_file, layer);
    const auto add = [&](const std::string& name, int out, int in, bool bias) {
      add_linear(setup.tensors, maker, prefix + name, {out, in}, in, bias ? out : 0);
    };
    add(names.query, query_width, sizes.embed, qkv_bias);
    add(names.key, kv_width, sizes.embed, qkv_bias);
    add(names.value, kv_width, sizes.embed, qkv_bias);
    add(names.out, sizes.embed, query_width, out_bias);
  }
  setup.plain = [=, prefix_in_file = setup.prefix_in_file](const TensorMap& tensors, int layer) {
    const std::string prefix = layer_prefix(prefix_in_file, layer);
    PlainAttention plain = sized(sizes);
    const auto head_of = [&](const std::string& name) -> HeadNumber {
      return [linear = linear_of(tensors, prefix + name), d = sizes.head_dim](
                 const auto& x, int head, int place) { return linear(x, head * d + place); };
    };
    plain.query = head_of(names.query);
    plain.key = head_of(names.key);
    plain.value = head_of(names.value);
    plain.out = linear_of(tensors, prefix + names.out);
    if (const Tensor* norm = find_tensor(tensors, prefix + "q_norm.weight")) {
      plain.query_norm = numbers_of(*norm);
      plain.key_norm = numbers_of(*tensor_at(tensors, prefix + "k_norm.weight"));
    }
    if (const Tensor* sinks = find_tensor(tensors, prefix + "sinks")) {
      plain.sinks = numbers_of(*sinks);
    }
    finish(plain, layer);
    return PlainRun([plain](const Rows& x) { return plain.run(x); });
  };
  return setup;
}

FamilyCase fused_case(FamilyCase setup, const Sizes& sizes, const std::string& fused,
                      const std::string& out, const FusedRows& rows, bool bias,
                      const Finish& finish, bool transposed) {
  TensorMaker maker(8);
  setup.embed_dim = sizes.embed;
  const int query_width = sizes.heads * sizes.head_dim;
  const int width = query_width + 2 * sizes.kv_heads * sizes.head_dim;
  for (int layer = 0; layer < setup.num_layers; ++layer) {
    const std::string prefix = layer_prefix(setup.prefix_in_file, layer);
    const auto shape = [&](int rows_out, int in) {
      return transposed ? Dims{in, rows_out} : Dims{rows_out, in};
    };
    add_linear(setup.tensors, maker, prefix + fused, shape(width, sizes.embed), sizes.embed,
               bias ? width : 0);
    add_linear(setup.tensors, maker, prefix + out, shape(sizes.embed, query_width), query_width,
               bias ? sizes.embed : 0);
  }
  setup.plain = [=, prefix_in_file = setup.prefix_in_file](const TensorMap& tensors, int layer) {
    const std::string prefix = layer_prefix(prefix_in_file, layer);
    PlainAttention plain = sized(sizes);
    const PlainLinear linear = linear_of(tensors, prefix + fused, transposed);
    const auto head_of = [&](const std::function<int(int, int)>& row) -> HeadNumber {
      return
          [linear, row](const auto& x, int head, int place) { return linear(x, row(head, place)); };
    };
    plain.query = head_of(rows.query);
    plain.key = head_of(rows.key);
    plain.value = head_of(rows.value);
    plain.out = linear_of(tensors, prefix + out, transposed);
    finish(plain, layer);
    return PlainRun([plain](const Rows& x) { return plain.run(x); });
  };
  return setup;
}

FusedRows multi_query_rows(const Sizes& s) {
  const int d = s.head_dim;
  const int queries = s.heads * d;
  return {.query = [=](int head, int place) { return head * d + place; },
          .key = [=](int, int place) { return queries + place; },
          .value = [=](int, int place) { return queries + d + place; }};
}

FusedRows per_head_rows(const Sizes& s) {
  const int d = s.head_dim;
  return {.query = [=](int head, int place) { return (3 * head + 0) * d + place; },
          .key = [=](int head, int place) { return (3 * head + 1) * d + place; },
          .value = [=](int head, int place) { return (3 * head + 2) * d + place; }};
}

FusedRows per_group_rows(const Sizes& s) {
  const int d = s.head_dim;
  const int group = s.heads / s.kv_heads;
  const int block = (group + 2) * d;
  return {.query = [=](int h, int place) { return h / group * block + h % group * d + place; },
          .key = [=](int h, int place) { return h * block + group * d + place; },
          .value = [=](int h, int place) { return h * block + (group + 1) * d + place; }};
}

FusedRows thirds_rows(const Sizes& s) {
  const int d = s.head_dim;
  const int third = s.heads * d;
  return {.query = [=](int head, int place) { return head * d + place; },
          .key = [=](int head, int place) { return third + head * d + place; },
          .value = [=](int head, int place) { return 2 * third + head * d + place; }};
}

std::vector<FamilyCase> family_cases() {
  std::vector<FamilyCase> all;
  for (auto* const part : {llama_cases, qwen_and_gemma_cases, falcon_cases, gpt_and_bert_cases,
                           deepseek_cases, converted_cases, newer_cases}) {
    for (FamilyCase& setup : part()) {
      // The rest of a model, which must be left alone.
      setup.tensors.emplace("rest.of.the.model", TensorMaker(3).make({5, 7}, 1));
      all.push_back(std::move(setup));
    }
  }
  return all;
}

}  // namespace ladon::test
