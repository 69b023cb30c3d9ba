// Context-parallel LatentAttention against the layer in one process: the same bits forward,
// gradients within the bounds of their sums, latents and nothing else between ranks.
#include "ladon/context_parallel_latent.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "parallel/latent_layers.h"
#include "parallel/message_layout.h"
#include "parallel/ranks.h"
#include "support/error_of.h"
#include "support/isas.h"

namespace ladon::test {
namespace {

std::span<const TokenRange> own(const std::vector<std::vector<TokenRange>>& ranges,
                                const Communicator& communicator) {
  return ranges[static_cast<std::size_t>(communicator.rank())];
}

Tensor part(const ConstTensorView& whole, std::span<const TokenRange> ranges) {
  Dims shape = whole.shape();
  shape[1] = total_length(ranges);
  Tensor tokens(whole.dtype(), shape);
  take_tokens(host_context(), whole, ranges, 1, tokens);
  return tokens;
}

/// Keys of one rank that some query of another may see; causal, the last query at the last key,
/// which is `offset` tokens further.
std::int64_t seen(const ContextPlan& plan, std::int64_t offset, int owner, int reader) {
  std::int64_t last = 0;
  for (const TokenRange& range : plan.queries[static_cast<std::size_t>(reader)]) {
    if (range.length() > 0) last = std::max(last, range.end + offset);
  }
  std::int64_t count = 0;
  for (const TokenRange& range : plan.keys[static_cast<std::size_t>(owner)]) {
    count += std::max<std::int64_t>(0, std::min(range.end, last) - range.begin);
  }
  return count;
}

class ContextParallelLatent : public testing::TestWithParam<Isa> {
 protected:
  Context context(int threads) const {
    return Context(ContextOptions{.num_threads = threads, .isa = GetParam()});
  }
  template <class Body>
  void for_each_layer(const Body& body) const {
    for (const int ranks : rank_counts()) {
      for (const LatentAttentionOptions& options : layer_options(2)) {
        body(whole_layer(options), ranks,
             std::to_string(ranks) + " ranks, query_rank " + std::to_string(options.query_rank));
      }
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Isas, ContextParallelLatent, testing::ValuesIn(runnable_isas()),
                         isa_test_name);

TEST_P(ContextParallelLatent, ForwardHasTheBitsOfOneProcess) {
  for_each_layer([&](LatentAttention whole, int ranks, const std::string& what) {
    const Tensor x = normal(whole.dtype(), {2, 33, kEmbed}, 1);
    const Tensor bias = normal(DType::kF32, {1, whole.num_heads(), 33, 1}, 2);
    const std::int64_t lengths[] = {33, 17};
    std::vector<std::int64_t> positions;
    for (std::int64_t i = 0; i < 2 * 33; ++i) positions.push_back(3 * i % 50);
    LayerCall call{.bias = bias, .kv_lengths = lengths};
    ContextPlan plan = plan_context(ranks, 33, 33, {.causal = true});
    for (const LatentForm form : kForms) {
      whole.set_form(form);
      plan.kv_heads_at_once = form == LatentForm::kExpanded ? 1 : 0;
      if (form == LatentForm::kExpanded && whole.rope_dim() != 0) {
        call.query_positions = call.key_positions = {.explicit_positions = positions};
      }
      const Tensor expected = whole.forward(context(2), x, call);
      expect_all_return(run_ranks(ranks, [&](Communicator& communicator) {
        const auto tokens = own(plan.queries, communicator);
        const Tensor mine = part(x, tokens);
        const Tensor out =
            context_parallel_forward(context(1), communicator, whole, {.query = mine}, plan, call);
        EXPECT_TRUE(same_bits(out, part(expected, tokens))) << what;
      }));
      call.query_positions = call.key_positions = {};
    }
  });
}

/// Training over ranks against one process: outputs, bytes and all gradients.
void check_training(const LatentAttention& layer, const Context& one, const Context& mine,
                    const LayerInputs& inputs, int ranks, const std::string& what) {
  const bool self = inputs.key.absent();
  const ConstTensorView& key = self ? inputs.query : inputs.key;
  const std::int64_t batch = inputs.query.size(0);
  const std::int64_t offset = key.size(1) - inputs.query.size(1);
  LatentAttention whole = layer;
  const Tensor dout = normal(whole.dtype(), inputs.query.shape(), 3);
  const TrainingForward forward = whole.forward_training(one, inputs);
  const InputGradients expected = whole.backward(one, dout, forward.saved);
  ContextPlan plan = plan_context(ranks, inputs.query.size(1), key.size(1), {.causal = true});
  plan.kv_heads_at_once = 3;
  const double tolerance = whole.dtype() == DType::kBF16 ? 0.03 : 2e-5;
  expect_all_return(run_ranks(ranks, [&](Communicator& communicator) {
    const int rank = communicator.rank();
    const auto queries = own(plan.queries, communicator);
    const auto keys = own(plan.keys, communicator);
    const Tensor own_query = part(inputs.query, queries);
    const Tensor own_key = part(key, keys);
    LayerInputs own_inputs{.query = own_query};
    if (!self) own_inputs.key = own_key;
    LatentAttention replica = layer;
    const TrainingForward got =
        context_parallel_forward_training(mine, communicator, replica, own_inputs, plan);
    EXPECT_TRUE(same_bits(got.out, part(forward.out, queries))) << what;
    std::int64_t sent = 0;
    std::int64_t returned = 0;
    for (int other = 0; other < ranks; ++other) {
      if (other == rank) continue;
      sent += batch * seen(plan, offset, rank, other) * whole.latent_dim() *
              static_cast<std::int64_t>(size_of(whole.dtype()));
      returned += batch * seen(plan, offset, other, rank) * whole.latent_dim() * 4;
    }
    EXPECT_EQ(communicator.statistics().bytes_sent, sent) << what;
    communicator.reset_statistics();
    const InputGradients gradients =
        context_parallel_backward(mine, communicator, replica, part(dout, queries), got.saved);
    std::int64_t of_parameters = 0;
    for (const Parameter& parameter : replica.named_parameters()) {
      of_parameters += all_reduce_bytes(parameter.value.num_elements(), rank, ranks);
    }
    EXPECT_EQ(communicator.statistics().bytes_sent, sent + returned + of_parameters) << what;
    expect_near(gradients.query, part(expected.query, queries), tolerance, "query, " + what);
    if (!self) expect_near(gradients.key, part(expected.key, keys), tolerance, "key, " + what);
    for (const Parameter& parameter : replica.named_parameters()) {
      expect_near(parameter.gradient, whole.parameter(parameter.name).gradient, tolerance,
                  parameter.name + ", " + what);
      expect_same_on_all(communicator, parameter.gradient, parameter.name + ", " + what);
    }
  }));
}

TEST_P(ContextParallelLatent, GradientsAreThoseOfOneProcess) {
  for_each_layer([&](const LatentAttention& layer, int ranks, const std::string& what) {
    const Tensor x = normal(layer.dtype(), {2, 29, kEmbed}, 1);
    check_training(layer, context(2), context(1), {.query = x}, ranks, what);
  });
}

TEST_P(ContextParallelLatent, KeysOfTheirOwn) {
  const LatentAttention layer = whole_layer(layer_options(2).front());
  const Tensor query = normal(layer.dtype(), {1, 12, kEmbed}, 1);
  const Tensor key = normal(layer.dtype(), {1, 31, kEmbed}, 2);
  for (const int ranks : rank_counts()) {
    check_training(layer, context(2), context(1), {.query = query, .key = key}, ranks,
                   std::to_string(ranks) + " ranks, keys of their own");
  }
}

TEST(ContextParallelLatentErrors, WhatIsRefused) {
  const LatentAttentionOptions options{
      .embed_dim = 8, .num_heads = 4, .kv_rank = 4, .nope_dim = 4, .rope_dim = 2};
  expect_all_return(run_ranks(2, [&](Communicator& communicator) {
    LatentAttention layer(options);
    ContextPlan plan = plan_context(2, 8, 8);
    const Tensor x(DType::kF32, {1, 4, 8});
    const auto refusal = [&](const LayerCall& call, ErrorCode code) {
      return error_of(
          [&] {
            context_parallel_forward(host_context(), communicator, layer, {.query = x}, plan, call);
          },
          code);
    };
    Tensor weights(DType::kF32, {1, 4, 8, 8});
    EXPECT_EQ(refusal({.weights = weights}, ErrorCode::kUnsupported),
              "context_parallel_forward: weights: got a tensor, expected none: each rank has the "
              "weights of its own queries alone");
    const Tensor bias(DType::kF32, {1, 1, 4, 8});
    EXPECT_EQ(refusal({.bias = bias}, ErrorCode::kInvalidArgument),
              "context_parallel_forward: bias: got [1, 1, 4, 8], expected [1, 4, 8, 8] or 1 in any "
              "place");
    plan.scheme = ContextScheme::kRing;
    EXPECT_EQ(refusal({}, ErrorCode::kUnsupported),
              "context_parallel_forward: plan.scheme: got 2, expected kAllGather or kAuto: latents "
              "are gathered");
    plan = plan_context(2, 8, 10);
    EXPECT_EQ(refusal({}, ErrorCode::kInvalidArgument),
              "context_parallel_forward: plan.keys: got other ranges than plan.queries, expected "
              "the same");
    plan = plan_context(2, 8, 8);
    // Ranks that disagree.
    layer.set_form(communicator.rank() == 0 ? LatentForm::kExpanded : LatentForm::kAbsorbed);
    EXPECT_NE(refusal({}, ErrorCode::kCommunication)
                  .find("ranks disagree: form: 1 on rank 0, 2 on rank 1"),
              std::string::npos);
    layer.set_form(LatentForm::kAuto);
    // Each kind of backward wants what its own forward saved.
    const TrainingForward plain = layer.forward_training(host_context(), {.query = x});
    EXPECT_EQ(error_of([&] {
                context_parallel_backward(host_context(), communicator, layer, x, plain.saved);
              }),
              "context_parallel_backward: saved: got what forward_training() saved, expected "
              "context_parallel_forward_training()");
    const TrainingForward parallel =
        context_parallel_forward_training(host_context(), communicator, layer, {.query = x}, plan);
    EXPECT_EQ(error_of([&] { layer.backward(host_context(), x, parallel.saved); }),
              "LatentAttention::backward: saved: got what context_parallel_forward_training() "
              "saved, expected forward_training()");
  }));
}

}  // namespace
}  // namespace ladon::test
