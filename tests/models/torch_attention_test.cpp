// torch.nn.MultiheadAttention's state: loaded, compared with plain attention, given back, refused.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "io/io_support.h"
#include "ladon/checkpoint.h"
#include "models/model_folder.h"
#include "support/error_of.h"
#include "support/host_context.h"

namespace ladon::test {
namespace {

constexpr int kEmbed = 24;
constexpr int kHeads = 4;
constexpr int kHeadDim = kEmbed / kHeads;

/// A module's state. `key_width` and `value_width` are PyTorch's kdim and vdim; 0 as it leaves
/// them.
TensorMap state(const std::string& prefix, bool bias, int key_width = 0, int value_width = 0) {
  TensorMaker maker(11);
  TensorMap tensors;
  const auto weight = [&](int out, int in) { return maker.make({out, in}, 1.4 / std::sqrt(in)); };
  if (key_width == 0) {
    tensors.emplace(prefix + "in_proj_weight", weight(3 * kEmbed, kEmbed));
  } else {
    tensors.emplace(prefix + "q_proj_weight", weight(kEmbed, kEmbed));
    tensors.emplace(prefix + "k_proj_weight", weight(kEmbed, key_width));
    tensors.emplace(prefix + "v_proj_weight", weight(kEmbed, value_width));
  }
  tensors.emplace(prefix + "out_proj.weight", weight(kEmbed, kEmbed));
  if (bias) {
    tensors.emplace(prefix + "in_proj_bias", maker.make({3 * kEmbed}, 0.4));
    tensors.emplace(prefix + "out_proj.bias", maker.make({kEmbed}, 0.4));
  }
  return tensors;
}

/// What the module computes: rows 0 to E of the fused tensors are q, E to 2E k, 2E to 3E v.
PlainAttention plain_of(const TensorMap& tensors, const std::string& prefix, bool causal) {
  PlainAttention plain;
  plain.num_heads = plain.num_kv_heads = kHeads;
  plain.head_dim = kHeadDim;
  plain.out_width = kEmbed;
  plain.causal = causal;
  plain.scale = 1 / std::sqrt(kHeadDim);
  const Tensor* const bias = find_tensor(tensors, prefix + "in_proj_bias");
  const auto part = [&](int third, const std::string& name) -> HeadNumber {
    const Tensor* const own = find_tensor(tensors, prefix + name);
    const Tensor* const fused = find_tensor(tensors, prefix + "in_proj_weight");
    return [=](const std::vector<double>& x, int head, int place) {
      const int row = head * kHeadDim + place;
      const double product =
          own != nullptr ? PlainLinear{own}(x, row) : PlainLinear{fused}(x, third * kEmbed + row);
      return product + (bias == nullptr ? 0 : bias->data_as<double>()[third * kEmbed + row]);
    };
  };
  plain.query = part(0, "q_proj_weight");
  plain.key = part(1, "k_proj_weight");
  plain.value = part(2, "v_proj_weight");
  plain.out = PlainLinear{tensor_at(tensors, prefix + "out_proj.weight"),
                          find_tensor(tensors, prefix + "out_proj.bias")};
  return plain;
}

Rows rows_of(const Tensor& x) {
  Rows rows;
  const auto width = static_cast<std::size_t>(x.size(1));
  for (std::int64_t token = 0; token < x.size(0); ++token) {
    const double* const first = x.data_as<double>() + token * x.size(1);
    rows.emplace_back(first, first + width);
  }
  return rows;
}

void expect_near(const Tensor& out, const Rows& expected, DType dtype) {
  const Tensor wide = Tensor::copy_of(host_context(), out, DType::kF64);
  const Rows got = rows_of(wide);
  ASSERT_EQ(got.size(), expected.size());
  double largest = 0;
  double scale = 0;
  for (std::size_t token = 0; token < got.size(); ++token) {
    for (std::size_t i = 0; i < got[token].size(); ++i) {
      largest = std::max(largest, std::abs(got[token][i] - expected[token][i]));
      scale = std::max(scale, std::abs(expected[token][i]));
    }
  }
  EXPECT_LE(largest, dtype == DType::kF64 ? 1e-10 : 1e-5 * scale);
}

class TorchAttention : public testing::Test {
 protected:
  const Context context_{ContextOptions{.num_threads = 1}};
  TempFolder temp_;
};

TEST_F(TorchAttention, AgreesWithPlainAttention) {
  const Tensor x = TensorMaker(5).make({9, kEmbed}, 1);
  for (const std::string prefix : {"", "encoder.layers.0.self_attn."}) {
    for (const bool bias : {true, false}) {
      for (const bool causal : {false, true}) {
        const TensorMap tensors = state(prefix, bias);
        for (const DType dtype : {DType::kF64, DType::kF32}) {
          write_tensors(temp_.path(), tensors, dtype);
          const TorchAttentionOptions options{
              .num_heads = kHeads, .prefix = prefix, .causal = causal, .dropout = 0.5};
          const auto layer =
              load_torch_attention(host_context(), temp_ / "model.safetensors", options);
          EXPECT_FALSE(layer->is_training());
          EXPECT_EQ(layer->dtype(), dtype);
          const Tensor converted = Tensor::copy_of(host_context(), x, dtype);
          expect_near(layer->forward(context_, converted.view()),
                      plain_of(tensors, prefix, causal).run(rows_of(x)), dtype);
          // The folder is as good as the file.
          const auto from_folder = load_torch_attention(host_context(), temp_.path(), options);
          EXPECT_EQ(bytes_of(from_folder->parameter("k_proj.weight").value),
                    bytes_of(layer->parameter("k_proj.weight").value));
        }
      }
    }
  }
}

TEST_F(TorchAttention, WithKeysAndValuesOfOtherWidths) {
  const TensorMap tensors = state("", true, 10, 14);
  write_tensors(temp_.path(), tensors, DType::kF64);
  const auto layer = load_torch_attention(host_context(), temp_.path(), {.num_heads = kHeads});
  const Tensor query = TensorMaker(1).make({5, kEmbed}, 1);
  const Tensor key = TensorMaker(2).make({7, 10}, 1);
  const Tensor value = TensorMaker(3).make({7, 14}, 1);
  expect_near(layer->forward(context_, {.query = query, .key = key, .value = value}),
              plain_of(tensors, "", false).run(rows_of(query), rows_of(key), rows_of(value)),
              DType::kF64);
}

TEST_F(TorchAttention, ComesBackUnderItsNames) {
  for (const bool bias : {true, false}) {
    for (const int key_width : {0, 10}) {
      for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
        const TensorMap tensors = state("a.", bias, key_width, 14);
        write_tensors(temp_.path(), tensors, dtype);
        const TorchAttentionOptions options{.num_heads = kHeads, .prefix = "a."};
        const auto layer = load_torch_attention(host_context(), temp_.path(), options);
        const std::vector<NamedTensor> saved = torch_attention_tensors(*layer, "a.");
        ASSERT_EQ(saved.size(), tensors.size());
        for (const NamedTensor& each : saved) {
          ASSERT_TRUE(tensors.contains(each.name)) << each.name;
          EXPECT_EQ(bytes_of(each.value),
                    bytes_of(Tensor::copy_of(host_context(), tensors.at(each.name), dtype)));
        }
        write_safetensors(temp_ / "again.safetensors", items_of(saved));
        const auto again =
            load_torch_attention(host_context(), temp_ / "again.safetensors", options);
        for (const Parameter& parameter : layer->named_parameters()) {
          EXPECT_EQ(bytes_of(parameter.value), bytes_of(again->parameter(parameter.name).value));
        }
      }
    }
  }
}

TEST_F(TorchAttention, Refusals) {
  const auto refusal = [&](TensorMap tensors, const TorchAttentionOptions& options,
                           ErrorCode code) {
    write_tensors(temp_.path(), tensors, DType::kF32);
    const std::string message = error_of(
        [&] { load_torch_attention(host_context(), temp_ / "model.safetensors", options); }, code);
    const std::string start =
        "load_torch_attention: " + (temp_ / "model.safetensors").string() + ": ";
    return message.starts_with(start) ? message.substr(start.size()) : message;
  };
  const auto with = [](TensorMap tensors, const std::string& name, const Dims& shape) {
    tensors.insert_or_assign(name, TensorMaker(1).make(shape, 1));
    return tensors;
  };
  const auto without = [](TensorMap tensors, const std::string& name) {
    tensors.erase(name);
    return tensors;
  };
  const TorchAttentionOptions usual{.num_heads = kHeads};
  EXPECT_EQ(refusal(state("", true), {}, ErrorCode::kInvalidArgument),
            "load_torch_attention: num_heads: got 0, expected 1 or more");
  EXPECT_EQ(refusal(state("", true), {.num_heads = 5}, ErrorCode::kInvalidArgument),
            "load_torch_attention: num_heads: got 5, expected a divisor of embed_dim = 24 because "
            "head_dim is not given");
  EXPECT_EQ(
      refusal(with(state("", true), "bias_k", {1, 1, kEmbed}), usual, ErrorCode::kUnsupported),
      "tensor \"bias_k\": got it, expected none: Ladon has no add_bias_kv");
  EXPECT_EQ(
      refusal(with(state("", true), "norm.weight", {3}), usual, ErrorCode::kIo),
      "tensor \"norm.weight\": got a tensor that is not expected, expected only the attention's "
      "own under \"\"");
  EXPECT_EQ(refusal(without(state("", true), "in_proj_weight"), usual, ErrorCode::kIo),
            "tensor \"q_proj_weight\": got none, expected a matrix");
  EXPECT_EQ(refusal(without(state("", true), "out_proj.weight"), usual, ErrorCode::kIo),
            "tensor \"out_proj.weight\": got none, expected one of shape [24, 24]");
  EXPECT_EQ(refusal(with(state("", true), "in_proj_weight", {72}), usual, ErrorCode::kIo),
            "tensor \"in_proj_weight\": got 1 dimensions, expected a matrix");
  EXPECT_EQ(refusal(with(state("", true), "in_proj_weight", {71, 24}), usual, ErrorCode::kIo),
            "tensor \"in_proj_weight\": got [71, 24], expected [72, 24]");
  EXPECT_EQ(refusal(with(state("", true), "in_proj_bias", {24}), usual, ErrorCode::kIo),
            "tensor \"in_proj_bias\": got [24], expected [72]");
  EXPECT_EQ(error_of([&] { load_torch_attention(host_context(), temp_ / "none", usual); },
                     ErrorCode::kIo),
            "load_torch_attention: " + (temp_ / "none").string() +
                ": got \"No such file or directory\", expected a file that can be read");

  using Options = MultiHeadAttentionOptions;
  const auto saving = [](const Options& options) {
    return error_of([&] { torch_attention_tensors(MultiHeadAttention(options)); });
  };
  const std::string start = "torch_attention_tensors: layer: got ";
  EXPECT_EQ(saving({.embed_dim = 8, .num_heads = 4, .num_kv_heads = 2}),
            start + "2 KV heads, expected 4");
  EXPECT_EQ(saving({.embed_dim = 8, .num_heads = 4, .head_dim = 3}),
            start + "a head_dim of 3, expected embed_dim / num_heads");
  EXPECT_EQ(saving({.embed_dim = 8, .num_heads = 4, .out_bias = true}),
            start + "some of the biases, expected all of them or none");
  EXPECT_EQ(saving({.embed_dim = 8, .num_heads = 4, .qk_norm = true}),
            start + "a q/k norm or sinks, expected none");
}

}  // namespace
}  // namespace ladon::test
