// ContextOptions::check_interrupt: what it throws leaves the call, and all is as it was.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "ladon/attention.h"
#include "ladon/kv_cache.h"
#include "ladon/latent_attention.h"
#include "ladon/multi_head_attention.h"
#include "ladon/random.h"
#include "support/contexts.h"
#include "support/host_context.h"

namespace ladon::test {
namespace {

struct Interrupted : std::runtime_error {
  Interrupted() : std::runtime_error("interrupted") {}
};

/// A Context whose calls end at the n-th check, and how often they have checked.
struct InterruptedContext {
  explicit InterruptedContext(int num_threads, std::optional<Isa> isa = {})
      : context({.num_threads = num_threads, .isa = isa, .check_interrupt = [this] { check(); }}) {}

  void check() {
    if (std::this_thread::get_id() != caller) ++on_other_threads;
    if (checks++ == last) throw Interrupted();
  }

  std::thread::id caller = std::this_thread::get_id();
  std::atomic<int> on_other_threads{0};
  std::atomic<int> checks{0};
  std::atomic<int> last{-1};
  Context context;
};

using Numbers = std::vector<std::vector<double>>;

/// Interrupts the operation at its first check, its second, ... and compares the state.
void expect_all_or_nothing(InterruptedContext& interrupted, const std::function<Numbers()>& state,
                           const std::function<void()>& operation) {
  interrupted.last = -1;
  interrupted.checks = 0;
  const Numbers before = state();
  int interruptions = 0;
  for (int n = 0;; ++n) {
    interrupted.checks = 0;
    interrupted.last = n;
    try {
      operation();
      break;
    } catch (const Interrupted&) {
      ++interruptions;
    }
    interrupted.last = -1;
    ASSERT_EQ(state(), before) << "check " << n;
    if (n >= 16) n += n / 2;  // later checks are like earlier ones
  }
  interrupted.last = -1;
  // With other threads the caller may find little left to do between two checks.
  if (interrupted.context.num_threads() == 1) {
    EXPECT_GE(interruptions, 3);
  }
  EXPECT_EQ(interrupted.on_other_threads, 0);
}

Numbers numbers_of(const AttentionLayer& layer) {
  Numbers all;
  for (const Parameter& parameter : layer.named_parameters()) {
    all.push_back(elements_of(parameter.value));
    if (!parameter.gradient.view().absent()) all.push_back(elements_of(parameter.gradient));
  }
  return all;
}

class Interrupt : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(ThreadCounts, Interrupt, testing::Values(1, 3));

TEST_P(Interrupt, EndsAttentionForwardAndBackward) {
  InterruptedContext interrupted(GetParam());
  const Context& context = interrupted.context;
  Tensor q(DType::kF32, {2, 300, 4, 32});
  fill_normal(context, q, 0, 1, 1);
  const auto nothing = [] { return Numbers(); };
  const Tensor expected = attention(host_context(), q, q, q, {.causal = true});
  Tensor out;
  expect_all_or_nothing(interrupted, nothing,
                        [&] { out = attention(context, q, q, q, {.causal = true}); });
  EXPECT_EQ(elements_of(out), elements_of(expected));
  Tensor lse(DType::kF32, {2, 4, 300});
  attention(host_context(), q, q, q, {.causal = true}, out, lse);
  Tensor dq(DType::kF32, {2, 300, 4, 32});
  expect_all_or_nothing(interrupted, nothing, [&] {
    attention_backward(context, q, q, q, {.causal = true}, {.out = out, .lse = lse, .dout = q},
                       {.dq = dq});
  });
}

template <class Layer>
void expect_layer_to_survive(InterruptedContext& interrupted, Layer layer) {
  const Context& context = interrupted.context;
  Tensor x(DType::kF32, {1, 150, layer.embed_dim()});
  fill_normal(context, x, 0, 1, 1);
  Tensor token(DType::kF32, {1, 1, layer.embed_dim()});
  fill_normal(context, token, 0, 1, 2);

  KvCache cache = KvCache::contiguous(context, layer.cache_options(/*batch=*/1));
  layer.forward(context, x, cache);
  const auto held = [&] {
    KvCache fork = cache.fork(context);
    return Numbers{{static_cast<double>(cache.length(0))},
                   elements_of(layer.forward(context, token, fork))};
  };
  expect_all_or_nothing(interrupted, held, [&] { layer.forward(context, x, cache); });
  EXPECT_EQ(cache.length(0), 300);

  for (Parameter& parameter : layer.named_parameters()) parameter.make_gradient(context);
  const auto state = [&] { return numbers_of(layer); };
  const TrainingForward made = layer.forward_training(context, {.query = x});
  expect_all_or_nothing(interrupted, state, [&] { layer.forward_training(context, {.query = x}); });
  const Numbers before = state();
  expect_all_or_nothing(interrupted, state, [&] { layer.backward(context, x, made.saved); });
  EXPECT_NE(state(), before);
}

TEST_P(Interrupt, LeavesLayersAndCachesAsTheyWere) {
  InterruptedContext interrupted(GetParam());
  expect_layer_to_survive(interrupted, MultiHeadAttention({.embed_dim = 256,
                                                           .num_heads = 8,
                                                           .num_kv_heads = 2,
                                                           .causal = true,
                                                           .rope = RopeOptions{}},
                                                          1));
  expect_layer_to_survive(interrupted, LatentAttention({.embed_dim = 256,
                                                        .num_heads = 4,
                                                        .query_rank = 64,
                                                        .kv_rank = 64,
                                                        .nope_dim = 32,
                                                        .rope_dim = 16},
                                                       1));
}

/// How often an operation checks.
int checks_of(InterruptedContext& interrupted, const std::function<void()>& operation) {
  interrupted.checks = 0;
  operation();
  return interrupted.checks;
}

// One head of one sequence takes the reference minutes where there are many tokens.
TEST(InterruptReference, ChecksBetweenTheRowsOfOneHead) {
  InterruptedContext interrupted(/*num_threads=*/1, Isa::kReference);
  const Context& context = interrupted.context;
  constexpr std::int64_t kTokens = 20;
  Tensor q(DType::kF32, {1, kTokens, 1, 4});
  fill_normal(context, q, 0, 1, 1);
  Tensor bias(DType::kF32, {1, 1, kTokens, kTokens});
  Tensor sinks(DType::kF32, {1});
  const AttentionOptions options{.causal = true, .bias = bias, .sinks = sinks};
  Tensor out(DType::kF32, q.shape());
  Tensor lse(DType::kF32, {1, 1, kTokens});
  EXPECT_GE(checks_of(interrupted, [&] { attention(context, q, q, q, options, out, lse); }),
            kTokens - 1);

  Tensor dq(DType::kF32, q.shape());
  Tensor dbias(DType::kF32, bias.shape());
  Tensor dsinks(DType::kF32, sinks.shape());
  const auto backward = [&](const AttentionGradients& gradients) {
    return checks_of(interrupted, [&] {
      attention_backward(context, q, q, q, options, {.out = out, .lse = lse, .dout = q}, gradients);
    });
  };
  EXPECT_GE(backward({.dq = dq}), kTokens - 1);
  EXPECT_GE(backward({.dq = dq, .dbias = dbias}), 2 * (kTokens - 1));
  EXPECT_GE(backward({.dq = dq, .dbias = dbias, .dsinks = dsinks}), 3 * (kTokens - 1));
}

TEST(InterruptReference, ChecksBetweenTheRowsOfProjections) {
  InterruptedContext interrupted(/*num_threads=*/1, Isa::kReference);
  const Context& context = interrupted.context;
  constexpr std::int64_t kTokens = 20;
  constexpr std::int64_t kWidth = 16;
  MultiHeadAttention layer({.embed_dim = kWidth, .num_heads = 1}, 1);
  Tensor x(DType::kF32, {1, kTokens, kWidth});
  fill_normal(context, x, 0, 1, 1);
  // q, k, v, attention and the output; then their gradients.
  EXPECT_GE(checks_of(interrupted, [&] { layer.forward(context, x); }), 5 * (kTokens - 1));
  const TrainingForward made = layer.forward_training(context, {.query = x});
  EXPECT_GE(checks_of(interrupted, [&] { layer.backward(context, x, made.saved); }),
            5 * (kTokens - 1) + 4 * (kWidth - 1));
}

}  // namespace
}  // namespace ladon::test
