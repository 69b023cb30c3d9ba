// ContextOptions::check_interrupt: what it throws leaves the call, and all is as it was.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
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
  explicit InterruptedContext(int num_threads)
      : context({.num_threads = num_threads, .check_interrupt = [this] { check(); }}) {}

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

}  // namespace
}  // namespace ladon::test
