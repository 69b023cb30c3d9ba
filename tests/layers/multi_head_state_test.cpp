// What a MultiHeadAttention holds and how it changes: copies, moves, saved states, weights set from
// outside, gradients cleared, training switched on and off.
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ladon/multi_head_attention.h"
#include "ladon/optim.h"
#include "ladon/random.h"
#include "support/contexts.h"
#include "support/error_of.h"

namespace ladon {
namespace {

using test::elements_of;
using test::error_of;

constexpr DType kFloatTypes[] = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16};

const char* const kForeignState =
    "MultiHeadAttention::backward: saved: got what another layer saved, expected what this layer's "
    "forward_training() saved";

std::vector<std::vector<double>> weights_of(const AttentionLayer& layer) {
  std::vector<std::vector<double>> all;
  for (const Parameter& parameter : layer.named_parameters()) {
    all.push_back(elements_of(parameter.value));
  }
  return all;
}

std::vector<std::vector<double>> gradients_of(const AttentionLayer& layer) {
  std::vector<std::vector<double>> all;
  for (const Parameter& parameter : layer.named_parameters()) {
    all.push_back(elements_of(parameter.gradient));
  }
  return all;
}

class MultiHeadState : public test::ContextTest {
 protected:
  MultiHeadAttention make(const MultiHeadAttentionOptions& options, std::uint64_t seed) const {
    return there(MultiHeadAttention(options, seed));
  }
  MultiHeadAttention make_layer(std::uint64_t seed, std::int64_t embed_dim = 8) const {
    MultiHeadAttention layer = make({.embed_dim = embed_dim,
                                     .num_heads = 4,
                                     .num_kv_heads = 2,
                                     .head_dim = 2,
                                     .value_bias = true,
                                     .qk_norm = true,
                                     .sinks = true},
                                    seed);
    std::uint64_t stream = 100;
    for (Parameter& parameter : layer.named_parameters()) {
      parameter.make_gradient(context_);
      fill_normal(context_, parameter.gradient, 0, 1, seed, ++stream);
    }
    return layer;
  }
  TrainingForward run(const MultiHeadAttention& layer) const {
    return layer.forward_training(context_, {.query = x_});
  }
  void expect_accepts(MultiHeadAttention& layer, const SavedForward& saved) const {
    const auto before = gradients_of(layer);
    const InputGradients gradients = layer.backward(context_, dout_, saved);
    EXPECT_EQ(gradients.query.shape(), x_.shape());
    EXPECT_NE(gradients_of(layer), before);
  }
  void expect_refuses(MultiHeadAttention& layer, const SavedForward& saved) const {
    const auto before = gradients_of(layer);
    EXPECT_EQ(error_of([&] { layer.backward(context_, dout_, saved); }), kForeignState);
    EXPECT_EQ(gradients_of(layer), before);
  }

  Tensor x_ = normal(DType::kF32, {2, 3, 8}, 1);
  Tensor dout_ = normal(DType::kF32, {2, 3, 8}, 2);
};
LADON_FOR_EACH_CONTEXT(MultiHeadState);

// ---- copies and moves ------------------------------------------------------------------------

TEST_P(MultiHeadState, ACopyHasEverythingOfItsOwn) {
  MultiHeadAttention original = make_layer(1);
  original.eval();
  const auto weights = weights_of(original);
  const auto gradients = gradients_of(original);
  MultiHeadAttention copy(original);
  EXPECT_EQ(weights_of(copy), weights);
  EXPECT_EQ(gradients_of(copy), gradients);
  EXPECT_FALSE(copy.is_training());
  EXPECT_EQ(copy.num_kv_heads(), 2);
  EXPECT_EQ(elements_of(run(copy).out), elements_of(run(original).out));

  copy.train();
  copy.zero_grad(context_);
  for (Parameter& parameter : copy.named_parameters())
    fill_normal(context_, parameter.value, 0, 1, 77);
  EXPECT_EQ(weights_of(original), weights);
  EXPECT_EQ(gradients_of(original), gradients);
  EXPECT_FALSE(original.is_training());
}

TEST_P(MultiHeadState, ACopyRefusesTheOriginalsState) {
  MultiHeadAttention original = make_layer(1);
  const TrainingForward before = run(original);
  MultiHeadAttention copy(original);
  expect_refuses(copy, before.saved);
  expect_refuses(original, run(copy).saved);
  expect_accepts(original, before.saved);
  expect_accepts(copy, run(copy).saved);
}

TEST_P(MultiHeadState, CopyAssignment) {
  const MultiHeadAttention source = make_layer(1);
  MultiHeadAttention target = make_layer(2, 16);
  target.eval();
  const Tensor wide = normal(DType::kF32, {3, 16}, 1);
  const TrainingForward old = target.forward_training(context_, {.query = wide});
  target = source;
  EXPECT_EQ(target.embed_dim(), 8);
  EXPECT_TRUE(target.is_training());
  EXPECT_EQ(weights_of(target), weights_of(source));
  EXPECT_EQ(gradients_of(target), gradients_of(source));
  // What target was is gone, and so is the use of what it saved; source's is not target's either.
  expect_refuses(target, old.saved);
  expect_refuses(target, run(source).saved);
  expect_accepts(target, run(target).saved);
  const auto weights = weights_of(source);
  for (Parameter& parameter : target.named_parameters())
    fill_normal(context_, parameter.value, 0, 1, 77);
  EXPECT_EQ(weights_of(source), weights);
}

TEST_P(MultiHeadState, AssignmentToItselfChangesNothing) {
  MultiHeadAttention layer = make_layer(1);
  const auto weights = weights_of(layer);
  const TrainingForward before = run(layer);
  const MultiHeadAttention& same = layer;
  layer = same;
  EXPECT_EQ(weights_of(layer), weights);
  expect_accepts(layer, before.saved);
}

TEST_P(MultiHeadState, AMovedLayerKeepsItsWeightsAndAcceptsItsState) {
  MultiHeadAttention first = make_layer(1);
  const auto weights = weights_of(first);
  const auto gradients = gradients_of(first);
  const void* memory = first.parameter("q_proj.weight").value.data();
  const TrainingForward before = run(first);
  MultiHeadAttention second(std::move(first));
  EXPECT_EQ(weights_of(second), weights);
  EXPECT_EQ(gradients_of(second), gradients);
  EXPECT_EQ(second.parameter("q_proj.weight").value.data(), memory);
  expect_accepts(second, before.saved);

  MultiHeadAttention third = make_layer(3, 16);
  third = std::move(second);
  EXPECT_EQ(weights_of(third), weights);
  EXPECT_EQ(third.embed_dim(), 8);
  expect_accepts(third, before.saved);

  MultiHeadAttention other = make_layer(4);
  std::swap(third, other);
  EXPECT_EQ(weights_of(other), weights);
  expect_accepts(other, before.saved);
  expect_refuses(third, before.saved);
}

TEST_P(MultiHeadState, LayersLiveInVectors) {
  std::vector<MultiHeadAttention> layers;
  std::vector<TrainingForward> saved;
  for (std::uint64_t i = 0; i < 5; ++i) {  // growing moves them
    layers.push_back(make_layer(i));
    saved.push_back(run(layers.back()));
  }
  for (std::size_t i = 0; i < 5; ++i) {
    expect_accepts(layers[i], saved[i].saved);
    expect_refuses(layers[i], saved[(i + 1) % 5].saved);
  }
}

TEST_P(MultiHeadState, AStateServesTwiceAndStandsAlone) {
  MultiHeadAttention layer = make_layer(1);
  layer.zero_grad(context_);
  auto input = std::make_unique<Tensor>(Tensor::copy_of(context_, x_));
  auto mask = std::make_unique<Tensor>(
      there(Tensor::from_values(DType::kBool, {1, 1, 3, 3}, {1, 0, 0, 1, 1, 0, 1, 1, 1})));
  auto lengths = std::make_unique<std::vector<std::int64_t>>(std::vector<std::int64_t>{3, 2});
  const TrainingForward forward =
      layer.forward_training(context_, {.query = *input}, {.mask = *mask, .kv_lengths = *lengths});
  const Tensor first = layer.backward(context_, dout_, forward.saved).query;
  const auto gradients = gradients_of(layer);
  // What the call was given may go before backward comes.
  fill_normal(context_, *input, 0, 1, 99);
  test::set_elements(context_, *mask, std::vector<double>(9, 0));
  input.reset();
  mask.reset();
  lengths.reset();
  layer.zero_grad(context_);
  const Tensor second = layer.backward(context_, dout_, forward.saved).query;
  EXPECT_EQ(elements_of(first), elements_of(second));
  EXPECT_EQ(gradients_of(layer), gradients);
}

TEST_P(MultiHeadState, SavedStatesMove) {
  MultiHeadAttention layer = make_layer(1);
  TrainingForward forward = run(layer);
  SavedForward moved = std::move(forward.saved);
  SavedForward assigned;
  EXPECT_EQ(assigned.impl(), nullptr);
  assigned = std::move(moved);
  expect_accepts(layer, assigned);
}

// ---- weights and gradients from outside ------------------------------------------------------

TEST_P(MultiHeadState, SetParameterConverts) {
  for (const DType dtype : kFloatTypes) {
    MultiHeadAttention layer = make({.embed_dim = 8, .num_heads = 2, .dtype = dtype}, 1);
    const auto others = elements_of(layer.parameter("k_proj.weight").value);
    for (const DType from : kFloatTypes) {
      const Tensor value = normal(from, {8, 8}, 5);
      const void* memory = layer.parameter("q_proj.weight").value.data();
      layer.set_parameter(context_, "q_proj.weight", value);
      const Parameter& parameter = layer.parameter("q_proj.weight");
      EXPECT_EQ(parameter.value.dtype(), dtype);
      EXPECT_EQ(parameter.value.data(), memory);
      EXPECT_EQ(elements_of(parameter.value), elements_of(Tensor::copy_of(context_, value, dtype)));
      EXPECT_EQ(elements_of(layer.parameter("k_proj.weight").value), others);
    }
  }
}

TEST_P(MultiHeadState, SetParameterTakesAnyStrides) {
  MultiHeadAttention layer = there(MultiHeadAttention::mqa(8, 2, 1));
  const Tensor transposed = normal(DType::kF32, {8, 4}, 5);
  layer.set_parameter(context_, "k_proj.weight", transposed.view().transpose(0, 1));
  const Tensor large = normal(DType::kF32, {9, 20}, 6);
  layer.set_parameter(context_, "v_proj.weight", large.view().slice(0, 2, 6).slice(1, 7, 15));
  const Tensor one = there(Tensor::from_values(DType::kF64, {1}, {0.5}));
  layer.set_parameter(context_, "q_proj.weight",
                      ConstTensorView(one.data(), DType::kF64, {8, 8}, {0, 0}, context_.device()));
  const auto weight_of = [&](const char* name) { return elements_of(layer.parameter(name).value); };
  const auto k = weight_of("k_proj.weight"), v = weight_of("v_proj.weight");
  const auto q = weight_of("q_proj.weight");
  const auto from_k = elements_of(transposed), from_v = elements_of(large);
  for (std::size_t i = 0; i < 4; ++i) {
    for (std::size_t j = 0; j < 8; ++j) {
      EXPECT_EQ(k[i * 8 + j], from_k[j * 4 + i]);
      EXPECT_EQ(v[i * 8 + j], from_v[(i + 2) * 20 + j + 7]);
      EXPECT_EQ(q[i * 8 + j], 0.5);
    }
  }
}

TEST_P(MultiHeadState, WeightsSetAreTheOnesUsed) {
  const MultiHeadAttention source = make_layer(1);
  MultiHeadAttention target = make_layer(2);
  for (const Parameter& parameter : source.named_parameters()) {
    target.set_parameter(context_, parameter.name, parameter.value);
  }
  EXPECT_EQ(elements_of(target.forward(context_, x_.view())),
            elements_of(source.forward(context_, x_.view())));
}

TEST_P(MultiHeadState, BackwardRefusesWeightsThatHaveChanged) {
  const std::string changed =
      "MultiHeadAttention::backward: saved: got what was saved before the weights changed, "
      "expected backward() before a step or set_parameter()";
  MultiHeadAttention layer = make_layer(1);
  const Tensor x = normal(DType::kF32, {1, 3, 8}, 1);
  const auto saved = [&] { return layer.forward_training(context_, {.query = x}).saved; };
  const SavedForward before_setting = saved();
  layer.set_parameter(context_, "q_proj.weight", normal(DType::kF32, {8, 8}, 5));
  EXPECT_EQ(error_of([&] { layer.backward(context_, x, before_setting); }), changed);
  const SavedForward before_step = saved();
  layer.backward(context_, x, before_step);
  layer.backward(context_, x, before_step);
  Sgd(context_, layer.parameters(), {.learning_rate = 0.1}).step(context_);
  EXPECT_EQ(error_of([&] { layer.backward(context_, x, before_step); }), changed);
  layer.backward(context_, x, saved());
}

TEST_P(MultiHeadState, ZeroGradClearsGradientsAlone) {
  for (const DType dtype : kFloatTypes) {
    MultiHeadAttention layer =
        make({.embed_dim = 8, .num_heads = 2, .out_bias = true, .dtype = dtype}, 1);
    for (Parameter& parameter : layer.named_parameters()) {
      parameter.make_gradient(context_);
      EXPECT_EQ(parameter.gradient.shape(), parameter.value.shape());
      fill_normal(context_, parameter.gradient, 1, 1, 3);
    }
    const auto weights = weights_of(layer);
    layer.zero_grad(context_);
    EXPECT_EQ(weights_of(layer), weights);
    for (const auto& gradient : gradients_of(layer)) {
      for (const double value : gradient) EXPECT_EQ(value, 0);
    }
  }
}

TEST_P(MultiHeadState, BackwardAddsToTheGradients) {
  MultiHeadAttention layer = make_layer(1);
  layer.zero_grad(context_);
  const TrainingForward forward = run(layer);
  layer.backward(context_, dout_, forward.saved);
  const auto once = gradients_of(layer);
  layer.backward(context_, dout_, forward.saved);
  const auto twice = gradients_of(layer);
  for (std::size_t n = 0; n < once.size(); ++n) {
    for (std::size_t i = 0; i < once[n].size(); ++i) EXPECT_EQ(twice[n][i], 2 * once[n][i]);
  }
}

// ---- training --------------------------------------------------------------------------------

TEST_P(MultiHeadState, DropoutActsInTrainingAlone) {
  const MultiHeadAttentionOptions options{.embed_dim = 8, .num_heads = 2, .dropout = 0.5};
  MultiHeadAttentionOptions without = options;
  without.dropout = 0;
  MultiHeadAttention layer = make(options, 1);
  const MultiHeadAttention plain = make(without, 1);
  const auto out = [&](std::uint64_t seed) {
    return elements_of(layer.forward(context_, x_.view(), {.dropout_seed = seed}));
  };
  const auto trained = [&](std::uint64_t seed) {
    return elements_of(layer.forward_training(context_, {.query = x_}, {.dropout_seed = seed}).out);
  };
  const auto expected = elements_of(plain.forward(context_, x_.view()));
  EXPECT_TRUE(layer.is_training());
  EXPECT_NE(trained(1), expected);
  EXPECT_NE(trained(1), trained(2));
  EXPECT_EQ(trained(1), trained(1));
  EXPECT_EQ(out(1), trained(1));
  layer.eval();
  EXPECT_FALSE(layer.is_training());
  EXPECT_EQ(out(1), expected);
  EXPECT_EQ(trained(1), expected);
  layer.train();
  EXPECT_TRUE(layer.is_training());
  EXPECT_NE(out(1), expected);
  layer.train(false);
  EXPECT_FALSE(layer.is_training());
  EXPECT_EQ(out(2), expected);
}

TEST_P(MultiHeadState, BackwardGoesByTheModeOfItsForward) {
  MultiHeadAttention layer = make({.embed_dim = 8, .num_heads = 2, .dropout = 0.5}, 1);
  const TrainingForward forward =
      layer.forward_training(context_, {.query = x_}, {.dropout_seed = 3});
  const auto expected = elements_of(layer.backward(context_, dout_, forward.saved).query);
  layer.eval();
  EXPECT_EQ(elements_of(layer.backward(context_, dout_, forward.saved).query), expected);
}

}  // namespace
}  // namespace ladon
