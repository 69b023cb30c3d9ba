// Every refusal of MultiHeadAttention's forward and backward: the whole message, and weights,
// gradients, training flag and outputs that are as they were.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "ladon/multi_head_attention.h"
#include "ladon/random.h"
#include "layers/multi_head_error_support.h"
#include "support/error_of.h"
#include "support/host_context.h"

namespace ladon::test {
namespace {

const MultiHeadAttentionOptions kSelf{.embed_dim = 8,
                                      .num_heads = 4,
                                      .num_kv_heads = 2,
                                      .out_bias = true,
                                      .rope = RopeOptions{},
                                      .qk_norm = true,
                                      .sinks = true};

MultiHeadAttentionOptions cross_options(std::int64_t key_dim, std::int64_t value_input_dim) {
  MultiHeadAttentionOptions options = kSelf;
  options.key_dim = key_dim;
  options.value_input_dim = value_input_dim;
  return options;
}

Tensor normal(DType dtype, const Dims& shape, std::uint64_t seed = 1) {
  Tensor tensor(dtype, shape);
  fill_normal(host_context(), tensor, 0, 1, seed);
  return tensor;
}

class MultiHeadCallErrors : public testing::Test {
 protected:
  /// forward() and forward_training() refuse alike.
  void expect_refused(const MultiHeadAttentionOptions& options, const LayerInputs& inputs,
                      const std::string& message, const LayerCall& call = {},
                      ErrorCode code = ErrorCode::kInvalidArgument) {
    SentinelLayer sentinel(options);
    const MultiHeadAttention& layer = sentinel.layer();
    EXPECT_EQ(error_of([&] { layer.forward(context_, inputs, call); }, code), message);
    EXPECT_EQ(error_of([&] { layer.forward_training(context_, inputs, call); }, code), message);
    sentinel.expect_unchanged();
  }
  void expect_input_refused(const MultiHeadAttentionOptions& options, const LayerInputs& inputs,
                            const std::string& message,
                            ErrorCode code = ErrorCode::kInvalidArgument) {
    expect_refused(options, inputs, "MultiHeadAttention::forward: " + message, {}, code);
  }
  /// A call on x_ that is legal but for one argument.
  void expect_call_refused(const LayerCall& call, const std::string& message) {
    expect_refused(kSelf, {.query = x_}, message, call);
  }

  Context context_{ContextOptions{.num_threads = 2}};
  Tensor x_ = normal(DType::kF32, {2, 3, 8});
  Tensor key_ = normal(DType::kF32, {2, 5, 8}, 2);
  Tensor value_ = normal(DType::kF32, {2, 5, 8}, 3);
};

// ---- inputs ----------------------------------------------------------------------------------

TEST_F(MultiHeadCallErrors, TheUnspoiledCallsAreLegal) {
  const MultiHeadAttention layer(kSelf);
  EXPECT_NO_THROW(layer.forward(context_, x_.view()));
  EXPECT_NO_THROW(layer.forward(context_, {.query = x_, .key = key_}));
  EXPECT_NO_THROW(layer.forward(context_, {.query = x_, .key = key_, .value = value_}));
}

TEST_F(MultiHeadCallErrors, Ranks) {
  const std::string shapes = ", expected [batch, seq, 8] or [seq, 8]";
  expect_input_refused(kSelf, {}, "query: got none, expected a tensor");
  expect_input_refused(kSelf, {.query = {}, .key = key_}, "query: got none, expected a tensor");
  for (const Dims& shape : {Dims{8}, Dims{1, 2, 3, 8}, Dims{}}) {
    const ConstTensorView x(x_.data(), DType::kF32, shape);
    expect_input_refused(kSelf, {.query = x}, "query: got " + shape.to_string() + shapes);
  }
  const ConstTensorView flat = x_.view().select(0, 0);
  const ConstTensorView flat_key = key_.view().select(0, 0);
  expect_input_refused(kSelf, {.query = x_, .key = flat_key},
                       "key: got [5, 8], expected 3 dimensions");
  expect_input_refused(kSelf, {.query = flat, .key = key_},
                       "key: got [2, 5, 8], expected 2 dimensions");
  expect_input_refused(kSelf, {.query = x_, .key = key_, .value = flat_key},
                       "value: got [5, 8], expected 3 dimensions");
  expect_input_refused(kSelf, {.query = flat, .key = flat_key, .value = value_},
                       "value: got [2, 5, 8], expected 2 dimensions");
}

TEST_F(MultiHeadCallErrors, Widths) {
  const auto narrow = [](const Tensor& tensor) { return tensor.view().slice(2, 0, 7); };
  expect_input_refused(kSelf, {.query = narrow(x_)}, "query: got [2, 3, 7], expected a width of 8");
  expect_input_refused(kSelf, {.query = narrow(x_).select(0, 1)},
                       "query: got [3, 7], expected a width of 8");
  expect_input_refused(kSelf, {.query = x_.view().slice(2, 0, 0)},
                       "query: got [2, 3, 0], expected a width of 8");
  expect_input_refused(kSelf, {.query = x_, .key = narrow(key_)},
                       "key: got [2, 5, 7], expected a width of 8");
  expect_input_refused(cross_options(7, 6), {.query = x_, .key = key_},
                       "key: got [2, 5, 8], expected a width of 7");
  expect_input_refused(cross_options(8, 6), {.query = x_, .key = key_, .value = narrow(value_)},
                       "value: got [2, 5, 7], expected a width of 6");
}

TEST_F(MultiHeadCallErrors, DtypesAndMemory) {
  for (const DType dtype : {DType::kF64, DType::kF16, DType::kBF16, DType::kBool}) {
    const std::string got = std::string(": got dtype ") + name_of(dtype) + ", expected f32";
    const Tensor x(dtype, {2, 3, 8});
    const Tensor other(dtype, {2, 5, 8});
    expect_input_refused(kSelf, {.query = x}, "query" + got);
    expect_input_refused(kSelf, {.query = x_, .key = other}, "key" + got);
    expect_input_refused(kSelf, {.query = x_, .key = key_, .value = other}, "value" + got);
  }
  MultiHeadAttentionOptions bf16 = kSelf;
  bf16.dtype = DType::kBF16;
  expect_input_refused(bf16, {.query = x_}, "query: got dtype f32, expected bf16");

  const void* data = x_.data();
  const Dims shape{2, 3, 8};
  expect_input_refused(kSelf, {.query = ConstTensorView(nullptr, DType::kF32, shape)},
                       "query: got a null pointer, expected data");
  expect_input_refused(
      kSelf, {.query = ConstTensorView(static_cast<const char*>(data) + 2, DType::kF32, shape)},
      "query: got data that is not aligned, expected a multiple of 4 bytes");
  expect_input_refused(kSelf, {.query = ConstTensorView(data, DType::kF32, shape, Device::kCuda)},
                       "query: got memory of cuda:0, expected memory of cpu, where the call runs");
  const Tensor columns = normal(DType::kF32, {2, 8, 3});
  expect_input_refused(kSelf, {.query = columns.view().transpose(1, 2)},
                       "query: got a last stride of 3, expected 1");
  const Tensor key_columns = normal(DType::kF32, {2, 8, 5});
  const ConstTensorView turned = key_columns.view().transpose(1, 2);
  expect_input_refused(kSelf, {.query = x_, .key = turned},
                       "key: got a last stride of 5, expected 1");
  expect_input_refused(kSelf, {.query = x_, .key = key_, .value = turned},
                       "value: got a last stride of 5, expected 1");
}

TEST_F(MultiHeadCallErrors, InputsThatAreMissing) {
  expect_input_refused(kSelf, {.query = x_, .value = value_},
                       "key: got none with a value, expected a tensor");
  const std::string needed =
      "key: got none, expected a tensor because key_dim or value_input_dim is not embed_dim";
  expect_input_refused(cross_options(7, 7), {.query = x_}, needed);
  expect_input_refused(cross_options(8, 7), {.query = x_}, needed);
  expect_input_refused(cross_options(7, 8), {.query = x_}, needed);
  expect_input_refused(cross_options(8, 7), {.query = x_, .key = key_},
                       "value: got none, expected a tensor because value_input_dim is not key_dim");
}

TEST_F(MultiHeadCallErrors, BatchesAndLengthsThatDiffer) {
  const auto first = [](const Tensor& tensor) { return tensor.view().slice(0, 0, 1); };
  expect_input_refused(kSelf, {.query = x_, .key = first(key_)},
                       "key: got a batch of 1, expected query's 2");
  expect_input_refused(kSelf, {.query = first(x_), .key = key_, .value = value_},
                       "key: got a batch of 2, expected query's 1");
  const std::string alike = ", expected as many sequences and positions as in key's ";
  expect_input_refused(kSelf, {.query = x_, .key = key_, .value = first(value_)},
                       "value: got [1, 5, 8]" + alike + "[2, 5, 8]");
  expect_input_refused(kSelf, {.query = x_, .key = key_, .value = value_.view().slice(1, 0, 4)},
                       "value: got [2, 4, 8]" + alike + "[2, 5, 8]");
  expect_input_refused(kSelf, {.query = x_, .key = key_.view().slice(1, 0, 0), .value = value_},
                       "value: got [2, 5, 8]" + alike + "[2, 0, 8]");
  const auto flat = [](const Tensor& tensor) { return tensor.view().select(0, 0); };
  expect_input_refused(kSelf,
                       {.query = flat(x_), .key = flat(key_), .value = flat(value_).slice(0, 0, 4)},
                       "value: got [4, 8]" + alike + "[5, 8]");
}

// ---- what a call may say ---------------------------------------------------------------------

TEST_F(MultiHeadCallErrors, MaskAndBias) {
  const std::string full = ", expected [2, 4, 3, 3] or 1 in any place";
  for (const Dims& shape :
       {Dims{2, 2, 3, 3}, Dims{2, 4, 3, 2}, Dims{3, 1, 1, 1}, Dims{1, 1, 0, 3}}) {
    const Tensor mask(DType::kBool, shape);
    const Tensor bias(DType::kF32, shape);
    expect_call_refused({.mask = mask},
                        "MultiHeadAttention::forward: mask: got " + shape.to_string() + full);
    expect_call_refused({.bias = bias},
                        "MultiHeadAttention::forward: bias: got " + shape.to_string() + full);
  }
  const Tensor flat(DType::kBool, {3, 3});
  expect_call_refused({.mask = flat},
                      "MultiHeadAttention::forward: mask: got [3, 3], expected 4 dimensions");
  const Tensor numbers(DType::kF32, {1, 1, 3, 3});
  expect_call_refused({.mask = numbers},
                      "MultiHeadAttention::forward: mask: got dtype f32, expected bool");
  const Tensor bools(DType::kBool, {1, 1, 3, 3});
  expect_call_refused(
      {.bias = bools},
      "MultiHeadAttention::forward: bias: got dtype bool, expected f64, f32, f16 or bf16");
}

TEST_F(MultiHeadCallErrors, Lengths) {
  const std::vector<std::int64_t> one{3}, three{3, 3, 3}, negative{3, -1}, long_one{4, 3};
  expect_call_refused({.kv_lengths = one},
                      "MultiHeadAttention::forward: kv_lengths: got 1 lengths, expected batch = 2");
  expect_call_refused({.kv_lengths = three},
                      "MultiHeadAttention::forward: kv_lengths: got 3 lengths, expected batch = 2");
  expect_call_refused(
      {.kv_lengths = negative},
      "MultiHeadAttention::forward: kv_lengths: got -1 at index 1, expected 0 to kv_len = 3");
  expect_call_refused(
      {.kv_lengths = long_one},
      "MultiHeadAttention::forward: kv_lengths: got 4 at index 0, expected 0 to kv_len = 3");
}

TEST_F(MultiHeadCallErrors, Positions) {
  const std::vector<std::int64_t> four{0, 1, 2, 3};
  const std::string count =
      "_positions.explicit_positions: got 4 positions, expected 3 (seq) or 6 (batch * seq)";
  const std::string forward = "MultiHeadAttention::forward: ";
  expect_call_refused({.query_positions = {.explicit_positions = four}}, forward + "query" + count);
  expect_call_refused({.key_positions = {.explicit_positions = four}}, forward + "key" + count);
  const std::vector<std::int64_t> three{0, 1, 2};
  expect_call_refused(
      {.key_positions = {.first = 2, .explicit_positions = three}},
      forward + "key_positions.first: got 2 together with an explicit list, expected 0");
}

TEST_F(MultiHeadCallErrors, PositionsOfASinglePosition) {
  // Attention needs no positions here, but wrong ones are as wrong as in any other call.
  MultiHeadAttentionOptions options = kSelf;
  options.sinks = false;
  const ConstTensorView one = x_.view().slice(1, 0, 1);
  const std::vector<std::int64_t> four{0, 1, 2, 3};
  const std::string count =
      "_positions.explicit_positions: got 4 positions, expected 1 (seq) or 2 (batch * seq)";
  const std::string forward = "MultiHeadAttention::forward: ";
  expect_refused(options, {.query = one}, forward + "query" + count,
                 {.query_positions = {.explicit_positions = four}});
  expect_refused(options, {.query = one}, forward + "key" + count,
                 {.key_positions = {.explicit_positions = four}});
}

TEST_F(MultiHeadCallErrors, Weights) {
  Tensor weights = normal(DType::kF32, {2, 4, 3, 4});
  const Tensor before = Tensor::copy_of(host_context(), weights);
  expect_call_refused(
      {.weights = weights},
      "MultiHeadAttention::forward: weights: got [2, 4, 3, 4], expected [2, 4, 3, 3]");
  expect_call_refused({.weights = weights.view().select(0, 0)},
                      "MultiHeadAttention::forward: weights: got [4, 3, 4], expected 4 dimensions");
  Tensor bools(DType::kBool, {2, 4, 3, 3});
  expect_call_refused(
      {.weights = bools},
      "MultiHeadAttention::forward: weights: got dtype bool, expected f64, f32, f16 or bf16");
  expect_call_refused(
      {.weights = TensorView(weights.data(), DType::kF32, {2, 4, 3, 3}, {0, 9, 3, 1})},
      "MultiHeadAttention::forward: weights: got strides [0, 9, 3, 1] that reach one element "
      "twice, expected an output without overlap");
  // A bad input is found before the weights are written.
  TensorView good = weights.view().slice(3, 0, 3);
  expect_refused(kSelf, {.query = x_.view().slice(2, 0, 7)},
                 "MultiHeadAttention::forward: query: got [2, 3, 7], expected a width of 8",
                 {.weights = good});
  for (std::int64_t i = 0; i < weights.num_elements(); ++i) {
    ASSERT_EQ(weights.data_as<float>()[i], before.data_as<float>()[i]);
  }
}

// ---- backward --------------------------------------------------------------------------------

TEST_F(MultiHeadCallErrors, StatesOfOthers) {
  SentinelLayer sentinel(kSelf);
  MultiHeadAttention& layer = sentinel.layer();
  const Tensor dout = normal(DType::kF32, {2, 3, 8});
  const auto refused = [&](const SavedForward& saved) {
    const std::string message = error_of([&] { layer.backward(context_, dout, saved); });
    sentinel.expect_unchanged();
    return message;
  };
  const std::string foreign =
      "MultiHeadAttention::backward: saved: got what another layer saved, expected what this "
      "layer's forward_training() saved";
  EXPECT_EQ(refused(SavedForward()),
            "MultiHeadAttention::backward: saved: got nothing, expected what forward_training() "
            "saved");
  const MultiHeadAttention twin(kSelf, 5);
  EXPECT_EQ(refused(twin.forward_training(context_, {.query = x_}).saved), foreign);
  const MultiHeadAttention copy(layer);
  EXPECT_EQ(refused(copy.forward_training(context_, {.query = x_}).saved), foreign);
  // A state outlives its layer, and no later layer takes its place.
  SavedForward orphan;
  {
    const MultiHeadAttention gone(kSelf, 5);
    orphan = gone.forward_training(context_, {.query = x_}).saved;
  }
  EXPECT_EQ(refused(orphan), foreign);
  MultiHeadAttention later(kSelf, 5);
  EXPECT_EQ(error_of([&] { later.backward(context_, dout, orphan); }), foreign);
  // What was moved out of is nothing.
  TrainingForward forward = layer.forward_training(context_, {.query = x_});
  const SavedForward taken(std::move(forward.saved));
  EXPECT_EQ(refused(forward.saved), refused(SavedForward()));
  EXPECT_NO_THROW(layer.backward(context_, dout, taken));
}

TEST_F(MultiHeadCallErrors, GradientsOfTheOutput) {
  const Tensor numbers = normal(DType::kF32, {2, 8, 8});
  const auto refuse = [&](const LayerInputs& inputs, const ConstTensorView& dout,
                          const std::string& message,
                          ErrorCode code = ErrorCode::kInvalidArgument) {
    SentinelLayer sentinel(kSelf);
    const TrainingForward forward = sentinel.layer().forward_training(context_, inputs);
    EXPECT_EQ(error_of([&] { sentinel.layer().backward(context_, dout, forward.saved); }, code),
              "MultiHeadAttention::backward: grad_out: " + message);
    sentinel.expect_unchanged();
  };
  const auto shaped = [&](const Dims& shape) {
    return ConstTensorView(numbers.data(), DType::kF32, shape);
  };
  const LayerInputs batched{.query = x_, .key = key_};
  const LayerInputs flat{.query = x_.view().select(0, 0)};
  refuse(batched, {}, "got none, expected a tensor");
  for (const Dims& shape : {Dims{2, 3, 7}, Dims{2, 5, 8}, Dims{1, 3, 8}, Dims{2, 0, 8}}) {
    refuse(batched, shaped(shape), "got " + shape.to_string() + ", expected [2, 3, 8]");
  }
  refuse(batched, shaped({6, 8}), "got [6, 8], expected 3 dimensions");
  refuse(flat, shaped({1, 3, 8}), "got [1, 3, 8], expected 2 dimensions");
  refuse(flat, shaped({4, 8}), "got [4, 8], expected [3, 8]");
  for (const DType dtype : {DType::kF64, DType::kF16, DType::kBF16, DType::kBool}) {
    const Tensor dout(dtype, {2, 3, 8});
    refuse(batched, dout, std::string("got dtype ") + name_of(dtype) + ", expected f32");
  }
  refuse(batched, ConstTensorView(nullptr, DType::kF32, {2, 3, 8}),
         "got a null pointer, expected data");
  refuse(batched, ConstTensorView(numbers.data(), DType::kF32, {2, 3, 8}, {64, 1, 8}),
         "got a last stride of 8, expected 1");
  refuse(batched, ConstTensorView(numbers.data(), DType::kF32, {2, 3, 8}, Device::kCuda),
         "got memory of cuda:0, expected memory of cpu, where the call runs");
}

}  // namespace
}  // namespace ladon::test
