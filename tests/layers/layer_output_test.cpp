// Calls of layers that write to the caller's memory: the bits of the forms that return tensors, and
// what they refuse.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ladon/latent_attention.h"
#include "ladon/multi_head_attention.h"
#include "support/contexts.h"
#include "support/error_of.h"

namespace ladon::test {
namespace {

constexpr std::int64_t kWidth = 8;

struct LayerCase {
  std::string name;
  std::function<std::unique_ptr<AttentionLayer>()> make;
  Dims query{2, 5, kWidth};
  Dims key{};  // of rank 0: the call has none
  Dims value{};
};

std::vector<LayerCase> every_case() {
  const auto multi_head = [](const MultiHeadAttentionOptions& options) {
    return [options] { return std::make_unique<MultiHeadAttention>(options, 3); };
  };
  const auto latent = [](const LatentAttentionOptions& options) {
    return [options] { return std::make_unique<LatentAttention>(options, 3); };
  };
  const MultiHeadAttentionOptions grouped{.embed_dim = kWidth,
                                          .num_heads = 4,
                                          .num_kv_heads = 2,
                                          .out_bias = true,
                                          .rope = RopeOptions{},
                                          .qk_norm = true};
  const MultiHeadAttentionOptions wide{
      .embed_dim = kWidth, .num_heads = 2, .key_dim = 6, .value_input_dim = 10};
  const MultiHeadAttentionOptions half{.embed_dim = kWidth, .num_heads = 2, .dtype = DType::kBF16};
  const LatentAttentionOptions latents{.embed_dim = kWidth,
                                       .num_heads = 2,
                                       .query_rank = 5,
                                       .kv_rank = 4,
                                       .nope_dim = 4,
                                       .rope_dim = 2,
                                       .value_dim = 4,
                                       .causal = true};
  LatentAttentionOptions half_latents = latents;
  half_latents.dtype = DType::kF16;
  return {
      {.name = "multi-head", .make = multi_head(grouped)},
      {.name = "without a batch", .make = multi_head(grouped), .query = {5, kWidth}},
      {.name = "one position", .make = multi_head(grouped), .query = {2, 1, kWidth}},
      {.name = "key", .make = multi_head(grouped), .key = {2, 7, kWidth}},
      {.name = "key and value", .make = multi_head(wide), .key = {2, 7, 6}, .value = {2, 7, 10}},
      {.name = "bf16", .make = multi_head(half)},
      {.name = "latent", .make = latent(latents)},
      {.name = "latent, without a batch", .make = latent(latents), .query = {5, kWidth}},
      {.name = "latent, key", .make = latent(latents), .key = {2, 7, kWidth}},
      {.name = "latent, f16", .make = latent(half_latents)}};
}

/// Memory for a tensor with gaps between its rows and its sequences, all of it NaN.
class GappedOutput {
 public:
  GappedOutput(const Context& context, DType dtype, const Dims& shape) : shape_(shape) {
    if (shape.rank() == 0) return;
    Dims padded = shape;
    for (int dim = 0; dim < shape.rank(); ++dim) padded[dim] += 3;
    memory_ = poisoned(context, dtype, padded);
  }
  TensorView view() {
    if (shape_.rank() == 0) return {};
    TensorView view = memory_.view();
    for (int dim = 0; dim < shape_.rank(); ++dim) view = view.slice(dim, 1, 1 + shape_[dim]);
    return view;
  }
  /// How many elements have been written, gaps included.
  std::int64_t written() const {
    std::int64_t count = 0;
    for (const double element : elements_of(memory_)) count += element == element ? 1 : 0;
    return count;
  }

 private:
  Dims shape_;
  Tensor memory_;
};

class LayerOutputTest : public ContextTest {
 protected:
  struct Inputs {
    Tensor query, key, value;
    LayerInputs views() const { return {query, key, value}; }
  };

  std::unique_ptr<AttentionLayer> layer_of(const LayerCase& setup) const {
    std::unique_ptr<AttentionLayer> layer = setup.make();
    layer->to(context_);
    return layer;
  }
  Inputs inputs_of(const LayerCase& setup, DType dtype) const {
    const auto make = [&](const Dims& shape, std::uint64_t seed) {
      return shape.rank() == 0 ? Tensor() : normal(dtype, shape, seed);
    };
    return {make(setup.query, 1), make(setup.key, 2), make(setup.value, 3)};
  }
  void expect_same_parameter_gradients(const AttentionLayer& a, const AttentionLayer& b) const {
    for (const Parameter& parameter : a.named_parameters()) {
      EXPECT_TRUE(same_bits(parameter.gradient, b.parameter(parameter.name).gradient))
          << parameter.name;
    }
  }
};

TEST_P(LayerOutputTest, HasTheBitsOfWhatIsReturned) {
  for (const LayerCase& setup : every_case()) {
    SCOPED_TRACE(setup.name);
    const auto returning = layer_of(setup);
    const auto writing = layer_of(setup);
    const DType dtype = returning->dtype();
    const Inputs inputs = inputs_of(setup, dtype);
    const Tensor grad_out = normal(dtype, setup.query, 9);

    GappedOutput whole(context_, dtype, setup.query);
    writing->forward(context_, inputs.views(), {}, whole.view());
    EXPECT_TRUE(same_bits(whole.view(), returning->forward(context_, inputs.views())));
    EXPECT_EQ(whole.written(), inputs.query.num_elements());

    GappedOutput trained(context_, dtype, setup.query);
    const TrainingForward expected = returning->forward_training(context_, inputs.views());
    const SavedForward saved =
        writing->forward_training(context_, inputs.views(), {}, trained.view());
    EXPECT_TRUE(same_bits(trained.view(), expected.out));
    EXPECT_EQ(trained.written(), inputs.query.num_elements());
    const InputShapes shapes = saved.input_shapes();
    EXPECT_TRUE(shapes.query == setup.query);
    EXPECT_TRUE(shapes.key == setup.key);
    EXPECT_TRUE(shapes.value == setup.value);

    const InputGradients gradients = returning->backward(context_, grad_out, expected.saved);
    GappedOutput query(context_, dtype, setup.query);
    GappedOutput key(context_, dtype, setup.key);
    GappedOutput value(context_, dtype, setup.value);
    writing->backward(context_, grad_out, saved, {query.view(), key.view(), value.view()});
    EXPECT_TRUE(same_bits(query.view(), gradients.query));
    EXPECT_EQ(query.written(), inputs.query.num_elements());
    EXPECT_EQ(gradients.key.rank(), setup.key.rank());
    EXPECT_EQ(gradients.value.rank(), setup.value.rank());
    if (setup.key.rank() != 0) {
      EXPECT_TRUE(same_bits(key.view(), gradients.key));
    }
    if (setup.value.rank() != 0) {
      EXPECT_TRUE(same_bits(value.view(), gradients.value));
    }
    expect_same_parameter_gradients(*writing, *returning);
  }
}

TEST_P(LayerOutputTest, GradientsThatAreNotWantedAreLeftOut) {
  for (const LayerCase& setup : every_case()) {
    SCOPED_TRACE(setup.name);
    const auto returning = layer_of(setup);
    const auto writing = layer_of(setup);
    const DType dtype = returning->dtype();
    const Inputs inputs = inputs_of(setup, dtype);
    const Tensor grad_out = normal(dtype, setup.query, 9);
    const InputGradients gradients = returning->backward(
        context_, grad_out, returning->forward_training(context_, inputs.views()).saved);
    const SavedForward saved = writing->forward_training(context_, inputs.views()).saved;
    const auto zero = [&] {
      for (AttentionLayer* layer : {returning.get(), writing.get()}) layer->zero_grad(context_);
    };
    zero();
    returning->backward(context_, grad_out,
                        returning->forward_training(context_, inputs.views()).saved);
    writing->backward(context_, grad_out, saved, {});
    expect_same_parameter_gradients(*writing, *returning);
    if (setup.key.rank() == 0) continue;
    Tensor key(context_, dtype, setup.key);
    writing->backward(context_, grad_out, saved, {.key = key});
    EXPECT_TRUE(same_bits(key, gradients.key));
  }
}

LADON_FOR_EACH_CONTEXT(LayerOutputTest);

/// Calls on the host that must be refused and leave everything as it was.
class LayerOutputErrors : public testing::Test {
 protected:
  LayerOutputErrors() {
    layers_.push_back(std::make_unique<MultiHeadAttention>(
        MultiHeadAttentionOptions{.embed_dim = kWidth, .num_heads = 2}, 1));
    layers_.push_back(std::make_unique<LatentAttention>(
        LatentAttentionOptions{
            .embed_dim = kWidth, .num_heads = 2, .kv_rank = 3, .nope_dim = 4, .rope_dim = 2},
        1));
    for (const auto& layer : layers_) {
      for (Parameter& parameter : layer->named_parameters()) parameter.make_gradient(context_);
    }
  }

  static Tensor zeros(const Dims& shape, DType dtype = DType::kF32) { return {dtype, shape}; }

  /// Expects the message, that no gradient of a parameter has changed, and `untouched` neither.
  void expect_refused(AttentionLayer& layer, const std::string& message, const Tensor& untouched,
                      const std::function<void()>& call) const {
    const std::vector<double> before = elements_of(untouched);
    EXPECT_EQ(error_of(call), std::string(layer.type_name()) + "::" + message);
    EXPECT_EQ(elements_of(untouched), before);
    for (const Parameter& parameter : layer.named_parameters()) {
      for (const double element : elements_of(parameter.gradient)) ASSERT_EQ(element, 0);
    }
  }

  Context context_{ContextOptions{.num_threads = 1}};
  std::vector<std::unique_ptr<AttentionLayer>> layers_;
  Tensor x_ = zeros({2, 3, kWidth});
  Tensor key_ = zeros({2, 4, kWidth});
};

TEST_F(LayerOutputErrors, OfForward) {
  for (const auto& layer : layers_) {
    const auto refused = [&](const std::string& message, const TensorView& out,
                             const LayerCall& call = {}) {
      const std::string whole = "forward: out: " + message;
      const LayerInputs inputs{.query = x_, .key = key_};
      expect_refused(*layer, whole, x_, [&] { layer->forward(context_, inputs, call, out); });
      expect_refused(*layer, whole, x_,
                     [&] { layer->forward_training(context_, inputs, call, out); });
    };
    Tensor wide = zeros({2, 3, kWidth + 1});
    Tensor flat = zeros({3, kWidth});
    Tensor half = zeros({2, 3, kWidth}, DType::kF16);
    Tensor bias = zeros({2, 2, 3, 4});
    refused("got none, expected a tensor", {});
    refused("got [2, 3, 9], expected [2, 3, 8]", wide);
    refused("got [3, 8], expected 3 dimensions", flat);
    refused("got dtype f16, expected f32", half);
    refused("got memory that overlaps query, expected separate memory", x_);
    refused("got memory that overlaps key, expected separate memory", key_.view().slice(1, 1, 4));
    const TensorView in_bias(bias.data(), DType::kF32, {2, 3, kWidth}, {24, kWidth, 1});
    refused("got memory that overlaps bias, expected separate memory", in_bias, {.bias = bias});
    const TensorView folded(wide.data(), DType::kF32, {2, 3, kWidth}, {0, kWidth, 1});
    refused(
        "got strides [0, 8, 1] that reach one element twice, expected an output without overlap",
        folded);
    Tensor& weight = layer->named_parameters()[0].value;
    const TensorView in_weight(weight.data(), DType::kF32, {2, 3, kWidth}, {24, kWidth, 1});
    refused("got memory that overlaps " + layer->named_parameters()[0].name +
                ", expected separate memory",
            in_weight);
    Tensor apart = zeros({2, 3, 2 * kWidth});
    const TensorView every_other(apart.data(), DType::kF32, {2, 3, kWidth},
                                 {6 * kWidth, 2 * kWidth, 2});
    refused("got a last stride of 2, expected 1", every_other);
  }
}

TEST_F(LayerOutputErrors, OfBackward) {
  for (const auto& layer : layers_) {
    const SavedForward self = layer->forward_training(context_, {.query = x_}).saved;
    const SavedForward cross = layer->forward_training(context_, {.query = x_, .key = key_}).saved;
    const Tensor grad_out = zeros(x_.shape());
    Tensor query = zeros(x_.shape());
    Tensor key = zeros(key_.shape());
    const auto refused = [&](const std::string& message, const SavedForward& saved,
                             const InputGradientViews& gradients) {
      expect_refused(*layer, "backward: gradients." + message, query,
                     [&] { layer->backward(context_, grad_out, saved, gradients); });
    };
    Tensor half = zeros(x_.shape(), DType::kF16);
    Tensor both = zeros({2, 4, 2 * kWidth});
    const TensorView left = both.view().slice(2, 0, kWidth);
    const TensorView middle = both.view().slice(2, kWidth / 2, kWidth / 2 + kWidth);
    const TensorView in_grad(const_cast<void*>(grad_out.data()), DType::kF32, x_.shape(),
                             {24, kWidth, 1});
    refused("query: got [2, 4, 8], expected [2, 3, 8]", self, {.query = key});
    refused("query: got dtype f16, expected f32", self, {.query = half});
    refused("query: got memory that overlaps grad_out, expected separate memory", self,
            {.query = in_grad});
    refused("key: got [2, 4, 8], expected none because the call had no key", self,
            {.query = query, .key = key});
    refused("value: got [2, 4, 8], expected none because the call had no value", cross,
            {.query = query, .key = key, .value = key});
    refused("key: got [2, 3, 8], expected [2, 4, 8]", cross, {.query = query, .key = query});
    refused("key: got memory that overlaps gradients.query, expected separate memory", cross,
            {.query = left.slice(1, 0, 3), .key = middle});
    Parameter& first = layer->named_parameters()[0];
    const TensorView in_gradient(first.gradient.data(), DType::kF32, x_.shape(), {24, kWidth, 1});
    refused(
        "query: got memory that overlaps " + first.name + "'s gradient, expected separate memory",
        self, {.query = in_gradient});
    // Nothing saved, and what another layer saved, come before the outputs.
    EXPECT_EQ(SavedForward().input_shapes().query.rank(), 0);
    expect_refused(*layer, "backward: saved: got nothing, expected what forward_training() saved",
                   query,
                   [&] { layer->backward(context_, grad_out, SavedForward(), {.query = key}); });
  }
}

}  // namespace
}  // namespace ladon::test
