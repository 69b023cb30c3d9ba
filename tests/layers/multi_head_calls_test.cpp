// Forward calls of MultiHeadAttention: with and without a batch, strided, empty and padded inputs,
// attention weights on request, and the shortcut for a single position. On every
// instruction set and on the pretended device.
#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ladon/attention.h"
#include "ladon/multi_head_attention.h"
#include "ladon/random.h"
#include "layers/norm.h"
#include "layers/projection.h"
#include "support/contexts.h"

namespace ladon {
namespace {

using test::elements_of;

constexpr DType kFloatTypes[] = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16};

/// Every option that leaves self-attention possible.
MultiHeadAttentionOptions rich_options(DType dtype = DType::kF32) {
  return {.embed_dim = 20,
          .num_heads = 4,
          .num_kv_heads = 2,
          .head_dim = 6,
          .query_bias = true,
          .key_bias = true,
          .value_bias = true,
          .out_bias = true,
          .causal = true,
          .rope = RopeOptions{.rotary_dim = 4},
          .qk_norm = true,
          .softcap = 5,
          .window_left = 6,
          .sinks = true,
          .dtype = dtype};
}

class MultiHeadCalls : public test::ContextTest {
 protected:
  /// Weights that are nowhere 0 or 1, so that each of them counts.
  MultiHeadAttention make_layer(const MultiHeadAttentionOptions& options) const {
    MultiHeadAttention layer = there(MultiHeadAttention(options, 11));
    std::uint64_t stream = 0;
    for (Parameter& parameter : layer.named_parameters()) {
      if (parameter.value.rank() == 1) fill_normal(context_, parameter.value, 0.5, 1, 12, ++stream);
    }
    return layer;
  }
};

TEST_P(MultiHeadCalls, ThroughTheInterface) {
  MultiHeadAttention layer = make_layer(rich_options());
  AttentionLayer& interface = layer;
  EXPECT_EQ(interface.type_name(), "MultiHeadAttention");
  EXPECT_EQ(interface.embed_dim(), 20);
  EXPECT_EQ(interface.num_heads(), 4);
  EXPECT_EQ(interface.num_kv_heads(), 2);
  EXPECT_EQ(interface.head_dim(), 6);
  EXPECT_EQ(interface.value_dim(), 6);
  EXPECT_EQ(interface.dtype(), DType::kF32);
  EXPECT_EQ(interface.named_parameters().size(), 11U);
  const Tensor x = normal(DType::kF32, {2, 5, 20}, 1);
  const Tensor out = interface.forward(context_, x.view());
  EXPECT_EQ(out.shape(), (Dims{2, 5, 20}));
  EXPECT_TRUE(same_bits(out, layer.forward(context_, LayerInputs{.query = x})));
  const TrainingForward forward = interface.forward_training(context_, {.query = x});
  EXPECT_TRUE(same_bits(out, forward.out));
  const InputGradients gradients = interface.backward(context_, out, forward.saved);
  EXPECT_EQ(gradients.query.shape(), x.shape());
  EXPECT_TRUE(gradients.key.view().absent());
  EXPECT_TRUE(gradients.value.view().absent());
}

TEST_P(MultiHeadCalls, CausalPerCall) {
  MultiHeadAttentionOptions options = rich_options();
  const MultiHeadAttention causal = make_layer(options);
  options.causal = false;
  const MultiHeadAttention open = make_layer(options);
  const Tensor x = normal(DType::kF32, {1, 5, 20}, 1);
  const auto out = [&](const MultiHeadAttention& layer, std::optional<bool> choice) {
    return layer.forward(context_, x.view(), {.causal = choice});
  };
  EXPECT_TRUE(same_bits(out(causal, {}), out(open, true)));
  EXPECT_TRUE(same_bits(out(open, {}), out(causal, false)));
  EXPECT_FALSE(same_bits(out(open, {}), out(causal, {})));
}

// ---- shapes and strides ----------------------------------------------------------------------

/// Gradients of a training call, in one tensor each.
std::vector<Tensor> train(const Context& context, MultiHeadAttention& layer,
                          const LayerInputs& inputs, const ConstTensorView& dout) {
  layer.zero_grad(context);
  TrainingForward forward = layer.forward_training(context, inputs);
  InputGradients gradients = layer.backward(context, dout, forward.saved);
  std::vector<Tensor> results;
  results.push_back(std::move(forward.out));
  for (Tensor* gradient : {&gradients.query, &gradients.key, &gradients.value}) {
    if (!gradient->view().absent()) results.push_back(std::move(*gradient));
  }
  return results;
}

// A key input of the query's length means what self-attention means, whatever kv_lengths hides:
// query i is at key i, as if the padding were not there.
TEST_P(MultiHeadCalls, CausalWithLengthsIsTheSameWithAKeyOfItsOwn) {
  MultiHeadAttentionOptions options = rich_options();
  options.softcap = 0;
  const MultiHeadAttention layer = make_layer(options);
  const Tensor x = normal(DType::kF32, {2, 7, 20}, 1);
  const std::vector<std::int64_t> lengths = {7, 4};
  const LayerCall call{.kv_lengths = lengths};
  const Tensor padded = layer.forward(context_, {.query = x}, call);
  EXPECT_EQ(elements_of(layer.forward(context_, {.query = x, .key = x}, call)),
            elements_of(padded));
  const Tensor alone = layer.forward(context_, x.view().slice(0, 1, 2).slice(1, 0, 4));
  const std::vector<double> expected = elements_of(alone);
  const std::vector<double> got =
      elements_of(context_, padded.view().slice(0, 1, 2).slice(1, 0, 4));
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 1e-5) << i;
}

// The last query is at the last key: the first two of 5 see none of 3.
TEST_P(MultiHeadCalls, CausalOverFewerKeysThanQueries) {
  const MultiHeadAttention layer =
      there(MultiHeadAttention({.embed_dim = 8, .num_heads = 2, .causal = true}, 4));
  const Tensor query = normal(DType::kF32, {1, 5, 8}, 1);
  const Tensor key = normal(DType::kF32, {1, 3, 8}, 2);
  const std::vector<double> out =
      elements_of(layer.forward(context_, {.query = query, .key = key}));
  for (std::size_t i = 0; i < out.size(); ++i) EXPECT_EQ(out[i] == 0, i < 2 * 8) << i;
}

TEST_P(MultiHeadCalls, WithAndWithoutABatch) {
  for (const DType dtype : kFloatTypes) {
    MultiHeadAttention layer = make_layer(rich_options(dtype));
    const Tensor query = normal(dtype, {1, 5, 20}, 1);
    const Tensor key = normal(dtype, {1, 7, 20}, 2);
    const Tensor value = normal(dtype, {1, 7, 20}, 3);
    const Tensor dout = normal(dtype, {1, 5, 20}, 4);
    const auto flat = [](const Tensor& tensor) { return tensor.view().select(0, 0); };
    const auto compare = [&](const LayerInputs& batched, const LayerInputs& unbatched) {
      const Tensor whole = layer.forward(context_, batched);
      EXPECT_TRUE(same_bits(flat(whole), layer.forward(context_, unbatched)));
      const auto expected = train(context_, layer, batched, dout);
      const auto results = train(context_, layer, unbatched, flat(dout));
      ASSERT_EQ(results.size(), expected.size());
      for (std::size_t i = 0; i < results.size(); ++i) {
        EXPECT_TRUE(same_bits(results[i], flat(expected[i]))) << name_of(dtype) << " " << i;
      }
    };
    compare({.query = query}, {.query = flat(query)});
    compare({.query = query, .key = key}, {.query = flat(query), .key = flat(key)});
    compare({.query = query, .key = key, .value = value},
            {.query = flat(query), .key = flat(key), .value = flat(value)});
  }
}

/// The same numbers at an odd place of a larger array of NaNs.
class Sliced {
 public:
  Sliced(const Context& context, const Tensor& dense)
      : storage_(test::poisoned(context, dense.dtype(),
                                {dense.size(0) + 1, dense.size(1) + 2, dense.size(2) + 3})) {
    copy(context, dense, view());
  }
  TensorView view() {
    return storage_.view()
        .slice(0, 1, storage_.size(0))
        .slice(1, 1, storage_.size(1) - 1)
        .slice(2, 3, storage_.size(2));
  }

 private:
  Tensor storage_;
};

TEST_P(MultiHeadCalls, StridedInputsGiveTheBitsOfDenseOnes) {
  for (const DType dtype : kFloatTypes) {
    MultiHeadAttentionOptions options = rich_options(dtype);
    options.key_dim = 9;
    options.value_input_dim = 33;
    MultiHeadAttention layer = make_layer(options);
    const Tensor query = normal(dtype, {3, 5, 20}, 1);
    const Tensor key = normal(dtype, {3, 7, 9}, 2);
    const Tensor value = normal(dtype, {3, 7, 33}, 3);
    const Tensor dout = normal(dtype, {3, 5, 20}, 4);
    const auto expected =
        train(context_, layer, {.query = query, .key = key, .value = value}, dout);
    const auto expect_same = [&](const std::vector<Tensor>& results, const char* how) {
      for (std::size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(same_bits(results[i], expected[i])) << name_of(dtype) << " " << how << " " << i;
      }
    };
    Sliced a(context_, query), b(context_, key), c(context_, value), d(context_, dout);
    expect_same(
        train(context_, layer, {.query = a.view(), .key = b.view(), .value = c.view()}, d.view()),
        "sliced");
    const auto seq_first = [&](const Tensor& dense) {
      return Tensor::copy_of(context_, dense.view().transpose(0, 1));
    };
    const Tensor q = seq_first(query), k = seq_first(key), v = seq_first(value),
                 g = seq_first(dout);
    const auto turned = [](const Tensor& tensor) { return tensor.view().transpose(0, 1); };
    expect_same(train(context_, layer, {.query = turned(q), .key = turned(k), .value = turned(v)},
                      turned(g)),
                "stored [seq, batch, width]");
  }
}

TEST_P(MultiHeadCalls, BroadcastAndReversedInputs) {
  const MultiHeadAttention layer = make_layer(rich_options());
  const Tensor one = normal(DType::kF32, {1, 4, 20}, 1);
  const ConstTensorView broadcast(one.data(), DType::kF32, {3, 4, 20}, {0, 20, 1},
                                  context_.device());
  const Tensor dense = Tensor::copy_of(context_, broadcast);
  EXPECT_TRUE(same_bits(layer.forward(context_, broadcast), layer.forward(context_, dense.view())));
  const ConstTensorView reversed(one.view().slice(1, 3, 4).data(), DType::kF32, {1, 4, 20},
                                 {80, -20, 1}, context_.device());
  const Tensor turned = Tensor::copy_of(context_, reversed);
  EXPECT_TRUE(same_bits(layer.forward(context_, reversed), layer.forward(context_, turned.view())));
  // One position each, batches apart: the shortcut's layout.
  const ConstTensorView column = one.view().transpose(0, 1);
  const Tensor rows = Tensor::copy_of(context_, column);
  EXPECT_TRUE(same_bits(layer.forward(context_, column), layer.forward(context_, rows.view())));
}

TEST_P(MultiHeadCalls, EmptyInputs) {
  for (const DType dtype : kFloatTypes) {
    MultiHeadAttention layer = make_layer(rich_options(dtype));
    const auto before = layer.parameter("out_proj.bias").value.data();
    for (const Dims& shape :
         {Dims{0, 5, 20}, Dims{3, 0, 20}, Dims{0, 1, 20}, Dims{0, 0, 20}, Dims{0, 20}}) {
      const Tensor x(context_, dtype, shape);
      EXPECT_EQ(layer.forward(context_, x.view()).shape(), shape);
      const auto results = train(context_, layer, {.query = x}, x);
      EXPECT_EQ(results[1].shape(), shape);
      for (const Parameter& parameter : layer.named_parameters()) {
        const Tensor zeros(parameter.gradient.dtype(), parameter.gradient.shape());
        EXPECT_TRUE(same_bits(parameter.gradient, zeros)) << parameter.name;
      }
    }
    EXPECT_EQ(layer.parameter("out_proj.bias").value.data(), before);
    // No keys at all: nothing is seen, and the output is its bias.
    const Tensor query = normal(dtype, {2, 3, 20}, 1);
    const Tensor none(context_, dtype, {2, 0, 20});
    const Tensor out = layer.forward(context_, {.query = query, .key = none});
    const ConstTensorView bias = layer.parameter("out_proj.bias").value;
    const ConstTensorView rows(bias.data(), dtype, {2, 3, 20}, {0, 0, 1}, bias.device());
    EXPECT_TRUE(same_bits(out, rows)) << name_of(dtype);
    const auto results = train(context_, layer, {.query = query, .key = none}, out);
    EXPECT_TRUE(same_bits(results[1], Tensor(dtype, {2, 3, 20})));
    EXPECT_EQ(results[2].shape(), (Dims{2, 0, 20}));
  }
}

TEST_P(MultiHeadCalls, APaddedSequenceGivesWhatItGivesAlone) {
  const Tensor x = normal(DType::kF32, {3, 9, 20}, 1);
  const std::vector<std::int64_t> lengths{9, 4, 1};
  for (const bool causal : {false, true}) {
    MultiHeadAttentionOptions options = rich_options();
    options.causal = causal;
    const MultiHeadAttention layer = make_layer(options);
    const Tensor out = layer.forward(context_, x.view(), {.kv_lengths = lengths});
    for (std::int64_t b = 0; b < 3; ++b) {
      const std::int64_t length = lengths[static_cast<std::size_t>(b)];
      const auto cut = [&](const ConstTensorView& view) {
        return view.slice(0, b, b + 1).slice(1, 0, length);
      };
      // Other lengths may take other kernels: near, not the same bits.
      const std::vector<double> expected = elements_of(layer.forward(context_, cut(x)));
      const std::vector<double> padded = elements_of(context_, cut(out));
      for (std::size_t i = 0; i < expected.size(); ++i) {
        EXPECT_NEAR(padded[i], expected[i], 2e-6)
            << "sequence " << b << ", causal " << causal << ", row " << i / 20;
      }
    }
  }
}

// ---- attention weights -----------------------------------------------------------------------

/// What the layer does before attention, step by step.
Tensor heads_of(const Context& context, const MultiHeadAttention& layer, const Tensor& x,
                const std::string& which, std::int64_t heads) {
  const std::int64_t tokens = x.size(0) * x.size(1);
  Tensor y(context, layer.dtype(), {x.size(0), x.size(1), heads, layer.head_dim()});
  project(context, x.view().reshape({tokens, x.size(2)}),
          layer.parameter(which + "_proj.weight").value,
          layer.parameter(which + "_proj.bias").value,
          y.view().reshape({tokens, heads * layer.head_dim()}));
  rms_norm(context, y, layer.parameter(which + "_norm.weight").value,
           layer.options().qk_norm_epsilon, y);
  rope(context, y, *layer.options().rope, RopePositions{}, y);
  return y;
}

TEST_P(MultiHeadCalls, WeightsOnRequest) {
  for (const DType dtype : kFloatTypes) {
    const MultiHeadAttention layer = make_layer(rich_options(dtype));
    const Tensor query = normal(dtype, {2, 5, 20}, 1);
    const Tensor key = normal(dtype, {2, 7, 20}, 2);
    const Tensor q = heads_of(context_, layer, query, "q", 4);
    const Tensor k = heads_of(context_, layer, key, "k", 2);
    const AttentionOptions options{
        .causal = true, .window_left = 6, .softcap = 5, .sinks = layer.parameter("sinks").value};
    for (const DType weights_dtype : kFloatTypes) {
      Tensor expected(context_, weights_dtype, {2, 4, 5, 7});
      attention_weights(context_, q, k, options, expected);
      Tensor weights(context_, weights_dtype, {2, 4, 5, 7});
      const Tensor out =
          layer.forward(context_, {.query = query, .key = key}, {.weights = weights});
      EXPECT_TRUE(same_bits(weights, expected)) << name_of(dtype) << " " << name_of(weights_dtype);
      EXPECT_TRUE(same_bits(out, layer.forward(context_, {.query = query, .key = key})));
      Tensor again(context_, weights_dtype, {2, 4, 5, 7});
      layer.forward_training(context_, {.query = query, .key = key}, {.weights = again});
      EXPECT_TRUE(same_bits(again, expected));
    }
  }
  // A single position has weights too: all of it, less what the sink takes.
  MultiHeadAttentionOptions plain = rich_options();
  plain.sinks = false;
  const Tensor x = normal(DType::kF32, {1, 1, 20}, 1);
  Tensor weights(context_, DType::kF32, {1, 4, 1, 1});
  make_layer(plain).forward(context_, x.view(), {.weights = weights});
  EXPECT_EQ(elements_of(weights), std::vector<double>(4, 1));
}

// ---- a single position -----------------------------------------------------------------------

TEST_P(MultiHeadCalls, TheShortcutForOnePositionGivesTheGeneralBits) {
  const Tensor all = there(Tensor::from_values(DType::kBool, {1, 1, 1, 1}, {1}));
  for (const DType dtype : kFloatTypes) {
    for (const std::int64_t kv_heads : {4, 2, 1}) {
      for (const bool rich : {false, true}) {
        MultiHeadAttentionOptions options{.embed_dim = 20, .num_heads = 4, .dtype = dtype};
        if (rich) options = rich_options(dtype);
        options.sinks = false;  // a sink leaves no shortcut: it takes a share of the one weight
        options.num_kv_heads = kv_heads;
        MultiHeadAttention layer = make_layer(options);
        for (const std::int64_t batch : {1, 3, 65}) {
          const Tensor x = normal(dtype, {batch, 1, 20}, 1);
          const std::string where = std::string(name_of(dtype)) + ", " + std::to_string(kv_heads) +
                                    " KV heads, batch " + std::to_string(batch);
          const Tensor out = layer.forward(context_, x.view());
          EXPECT_TRUE(same_bits(out, layer.forward(context_, x.view(), {.mask = all}))) << where;
          const TrainingForward forward = layer.forward_training(context_, {.query = x});
          EXPECT_TRUE(same_bits(out, forward.out)) << where;
          // A row of its own, and the first row of a longer causal sequence.
          const Tensor alone = layer.forward(context_, x.view().slice(0, batch - 1, batch));
          EXPECT_TRUE(same_bits(alone, out.view().slice(0, batch - 1, batch))) << where;
          Tensor longer = normal(dtype, {batch, 3, 20}, 2);
          copy(context_, x, longer.view().slice(1, 0, 1));
          const Tensor first = layer.forward(context_, longer.view(), {.causal = true});
          EXPECT_TRUE(same_bits(out, first.view().slice(1, 0, 1))) << where;
        }
      }
    }
  }
}

LADON_FOR_EACH_CONTEXT(MultiHeadCalls);

}  // namespace
}  // namespace ladon
