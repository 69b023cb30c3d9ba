// Calls of layers over ranks that write to the caller's memory: the bits of the forms that return
// tensors, and nothing written where a rank is refused.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ladon/context_parallel_latent.h"
#include "ladon/tensor_parallel.h"
#include "parallel/layer_support.h"
#include "parallel/ranks.h"
#include "support/error_of.h"

namespace ladon::test {
namespace {

constexpr std::int64_t kEmbed = 24;
constexpr std::int64_t kHeads = 84;  // a multiple of every number of ranks

MultiHeadAttentionOptions heads() {
  return {.embed_dim = kEmbed, .num_heads = kHeads, .head_dim = 2};
}
LatentAttentionOptions latents() {
  return {.embed_dim = kEmbed, .num_heads = kHeads, .kv_rank = 6, .nope_dim = 2, .rope_dim = 2};
}

/// Memory for a tensor with a gap behind each sequence.
struct Gapped {
  explicit Gapped(const Dims& shape)
      : memory(DType::kF32, {shape[0], shape[1] + 2, shape[2]}),
        view(memory.view().slice(1, 0, shape[1])) {}
  Tensor memory;
  TensorView view;
};

/// Both forms of a layer's training, on copies of one layer.
template <class Forward, class ForwardTo, class Backward, class BackwardTo>
void expect_same(const LayerInputs& inputs, const Forward& forward, const ForwardTo& forward_to,
                 const Backward& backward, const BackwardTo& backward_to) {
  Gapped out(inputs.query.shape());
  const TrainingForward expected = forward(inputs);
  const SavedForward saved = forward_to(inputs, out.view);
  EXPECT_TRUE(same_bits(out.view, expected.out));
  const Tensor grad_out = normal(DType::kF32, inputs.query.shape(), 9);
  const InputGradients gradients = backward(grad_out, expected.saved);
  Gapped query(inputs.query.shape());
  Gapped key(inputs.key.shape());
  backward_to(grad_out, saved, InputGradientViews{.query = query.view, .key = key.view});
  EXPECT_TRUE(same_bits(query.view, gradients.query));
  EXPECT_TRUE(same_bits(key.view, gradients.key));
}

void expect_same_gradients(const AttentionLayer& a, const AttentionLayer& b) {
  for (const Parameter& parameter : a.named_parameters()) {
    EXPECT_TRUE(same_bits(parameter.gradient, b.parameter(parameter.name).gradient))
        << parameter.name;
  }
}

template <class Layer, class Whole>
void check_tensor_parallel(Communicator& communicator, const Whole& whole) {
  const Context& context = host_context();
  Layer returning(communicator, whole.options());
  Layer writing(communicator, whole.options());
  returning.set_whole_parameters(context, whole);
  writing.set_whole_parameters(context, whole);
  const Tensor query = normal(DType::kF32, {2, 5, kEmbed}, 1);
  const Tensor key = normal(DType::kF32, {2, 7, kEmbed}, 2);
  expect_same(
      {.query = query, .key = key},
      [&](const LayerInputs& inputs) { return returning.forward_training(context, inputs); },
      [&](const LayerInputs& inputs, const TensorView& out) {
        Gapped plain(inputs.query.shape());
        writing.forward(context, inputs, {}, plain.view);
        SavedForward saved = writing.forward_training(context, inputs, {}, out);
        EXPECT_TRUE(same_bits(plain.view, out));
        return saved;
      },
      [&](const Tensor& grad_out, const SavedForward& saved) {
        return returning.backward(context, grad_out, saved);
      },
      [&](const Tensor& grad_out, const SavedForward& saved, const InputGradientViews& gradients) {
        writing.backward(context, grad_out, saved, gradients);
      });
  expect_same_gradients(returning, writing);
}

TEST(LayerOutputRanks, TensorParallelLayersHaveTheBitsOfWhatIsReturned) {
  const MultiHeadAttention multi_head(heads(), 5);
  const LatentAttention latent(latents(), 5);
  for (const int ranks : rank_counts()) {
    SCOPED_TRACE(ranks);
    expect_all_return(run_ranks(ranks, [&](Communicator& communicator) {
      check_tensor_parallel<TensorParallelAttention>(communicator, multi_head);
      check_tensor_parallel<TensorParallelLatentAttention>(communicator, latent);
    }));
  }
}

TEST(LayerOutputRanks, ContextParallelLayersHaveTheBitsOfWhatIsReturned) {
  const LatentAttention whole(latents(), 5);
  for (const int ranks : rank_counts()) {
    SCOPED_TRACE(ranks);
    expect_all_return(run_ranks(ranks, [&](Communicator& communicator) {
      const Context& context = host_context();
      LatentAttention returning(whole);
      LatentAttention writing(whole);
      const ContextPlan plan = plan_context(ranks, 4 * ranks, 6 * ranks);
      const auto rank = static_cast<std::size_t>(communicator.rank());
      const auto own = [&](const std::vector<std::vector<TokenRange>>& ranges, std::uint64_t seed) {
        std::int64_t length = 0;
        for (const TokenRange& range : ranges[rank]) length += range.end - range.begin;
        return normal(DType::kF32, {2, length, kEmbed}, seed);
      };
      const Tensor query = own(plan.queries, 1);
      const Tensor key = own(plan.keys, 2);
      expect_same(
          {.query = query, .key = key},
          [&](const LayerInputs& inputs) {
            return context_parallel_forward_training(context, communicator, returning, inputs,
                                                     plan);
          },
          [&](const LayerInputs& inputs, const TensorView& out) {
            Gapped plain(inputs.query.shape());
            context_parallel_forward(context, communicator, writing, inputs, plan, {}, plain.view);
            EXPECT_TRUE(same_bits(plain.view, context_parallel_forward(context, communicator,
                                                                       writing, inputs, plan)));
            return context_parallel_forward_training(context, communicator, writing, inputs, plan,
                                                     {}, out);
          },
          [&](const Tensor& grad_out, const SavedForward& saved) {
            return context_parallel_backward(context, communicator, returning, grad_out, saved);
          },
          [&](const Tensor& grad_out, const SavedForward& saved,
              const InputGradientViews& gradients) {
            context_parallel_backward(context, communicator, writing, grad_out, saved, gradients);
          });
      expect_same_gradients(returning, writing);
    }));
  }
}

TEST(LayerOutputRanks, ARefusedOutputOfOneRankEndsTheCallOnAll) {
  const MultiHeadAttention whole(heads(), 5);
  expect_all_return(run_ranks(2, [&](Communicator& communicator) {
    const Context& context = host_context();
    TensorParallelAttention layer(communicator, whole.options());
    layer.set_whole_parameters(context, whole);
    for (Parameter& parameter : layer.named_parameters()) parameter.make_gradient(context);
    const bool odd = communicator.rank() == 1;
    const Tensor x = normal(DType::kF32, {1, 3, kEmbed}, 1);
    Tensor out(DType::kF32, {1, 3, odd ? kEmbed + 1 : kEmbed});
    const auto message_of = [&](const auto& call) {
      return error_of(call, odd ? ErrorCode::kInvalidArgument : ErrorCode::kCommunication);
    };
    const auto expect = [&](const std::string& message, const std::string& argument) {
      EXPECT_NE(message.find(argument + ": got [1, 3, 25], expected [1, 3, 24]"), std::string::npos)
          << message;
    };
    expect(message_of([&] { layer.forward_training(context, {.query = x}, {}, out); }), "out");
    const SavedForward saved = layer.forward_training(context, {.query = x}).saved;
    expect(message_of([&] { layer.backward(context, x, saved, {.query = out}); }),
           "gradients.query");
    // Ranks add up the gradients of inputs, so all of them want the same.
    Tensor dx(DType::kF32, x.shape());
    const std::string message = error_of(
        [&] { layer.backward(context, x, saved, {.query = odd ? dx.view() : TensorView()}); },
        ErrorCode::kCommunication);
    EXPECT_NE(message.find("ranks disagree: gradients"), std::string::npos) << message;
    for (const Tensor* tensor : {&out, &dx, &layer.parameter("q_proj.weight").gradient}) {
      const Tensor zeros(tensor->dtype(), tensor->shape());
      EXPECT_TRUE(same_bits(*tensor, zeros));
    }
  }));
}

}  // namespace
}  // namespace ladon::test
