// Whichever allocation fails, in training, in an optimiser's step or in loading: an Error
// (kOutOfMemory) or std::bad_alloc leaves, nothing else, and all is as it was.

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "ladon/checkpoint.h"
#include "ladon/error.h"
#include "ladon/latent_attention.h"
#include "ladon/multi_head_attention.h"
#include "ladon/optim.h"
#include "models/model_folder.h"
#include "support/contexts.h"
#include "support/failing_allocator.h"
#include "support/host_context.h"
#include "support/temp_folder.h"

namespace ladon::test {
namespace {

using Numbers = std::vector<std::vector<double>>;

Numbers numbers_of(const AttentionLayer& layer) {
  Numbers all;
  for (const Parameter& parameter : layer.named_parameters()) {
    all.push_back(elements_of(parameter.value));
    if (!parameter.gradient.view().absent()) all.push_back(elements_of(parameter.gradient));
  }
  return all;
}

/// Runs an operation with the first, the second, ... allocation failing, until none is left to
/// fail. After each failure `state` must be what it was.
void expect_all_or_nothing(const std::string& name, const std::function<Numbers()>& state,
                           const std::function<void()>& operation, int least) {
  for (const bool from_then_on : {false, true}) {
    int failures = 0;
    for (int n = 0;; ++n) {
      ASSERT_LT(n, 5000) << name;
      const Numbers before = state();
      bool done = false;
      std::string wrong;
      fail_allocation(n, from_then_on);
      try {
        operation();
        done = true;
      } catch (const std::bad_alloc&) {
      } catch (const Error& error) {
        stop_failing();
        if (error.code() != ErrorCode::kOutOfMemory) wrong = error.what();
      } catch (const std::exception& error) {
        stop_failing();
        wrong = std::string("not an Error: ") + error.what();
      }
      const bool failed = stop_failing();
      ASSERT_EQ(wrong, "") << name << ", allocation " << n;
      if (done && !failed) break;
      // An allocation that failed may also have been done without.
      if (done) continue;
      ++failures;
      ASSERT_TRUE(failed) << name;
      ASSERT_EQ(state(), before) << name << ", allocation " << n;
    }
    EXPECT_GE(failures, least) << name;
  }
}

template <class Layer>
void expect_training_to_survive(const std::string& name, Layer layer) {
  const Context context({.num_threads = 1});
  Tensor x(DType::kF32, {2, 3, layer.embed_dim()});
  fill_normal(context, x, 0, 1, 1);
  for (Parameter& parameter : layer.named_parameters()) parameter.make_gradient(context);
  const auto state = [&] { return numbers_of(layer); };
  const TrainingForward made = layer.forward_training(context, {.query = x});
  expect_all_or_nothing(
      name + " forward_training", state, [&] { layer.forward_training(context, {.query = x}); }, 5);
  expect_all_or_nothing(
      name + " backward", state, [&] { layer.backward(context, x, made.saved); }, 5);
  Tensor out(DType::kF32, x.shape());
  const auto state_and_out = [&] {
    Numbers all = numbers_of(layer);
    all.push_back(elements_of(out));
    return all;
  };
  expect_all_or_nothing(
      name + " forward_training to memory", state_and_out,
      [&] { layer.forward_training(context, {.query = x}, {}, out); }, 5);
  set_elements(context, out, std::vector<double>(static_cast<std::size_t>(out.num_elements()), 7));
  expect_all_or_nothing(
      name + " backward to memory", state_and_out,
      [&] { layer.backward(context, x, made.saved, {.query = out}); }, 5);
  expect_all_or_nothing(
      name + " copy", state, [&] { const Layer copied(layer); }, 5);
  expect_all_or_nothing(
      name + " AdamW", state, [&] { const AdamW optimiser(context, layer.parameters(), {}); }, 5);
  AdamW optimiser(context, layer.parameters(), {});
  expect_all_or_nothing(
      name + " step", state, [&] { optimiser.step(context); }, 0);
  Sgd sgd(context, layer.parameters(), {.learning_rate = 0.1, .momentum = 0.5});
  expect_all_or_nothing(
      name + " Sgd step", state, [&] { sgd.step(context); }, 0);
  expect_all_or_nothing(
      name + " clip_gradients", state, [&] { clip_gradients(context, layer.parameters(), 1e9); },
      0);
}

TEST(LayerFaults, Training) {
  expect_training_to_survive("multi-head", MultiHeadAttention({.embed_dim = 8,
                                                               .num_heads = 4,
                                                               .num_kv_heads = 2,
                                                               .causal = true,
                                                               .rope = RopeOptions{},
                                                               .qk_norm = true},
                                                              1));
  expect_training_to_survive("latent", LatentAttention({.embed_dim = 8,
                                                        .num_heads = 2,
                                                        .query_rank = 4,
                                                        .kv_rank = 4,
                                                        .nope_dim = 4,
                                                        .rope_dim = 2},
                                                       1));
}

TEST(LayerFaults, Loading) {
  const Context context({.num_threads = 1});
  for (const bool sharded : {false, true}) {
    for (const char* name : {"llama3", "deepseek_v3"}) {
      const TempFolder folder;
      write_model(folder.path(), family_case(name), DType::kF32, sharded);
      const auto state = [] { return Numbers(); };
      expect_all_or_nothing(
          std::string(name) + " describe_model", state, [&] { describe_model(folder.path()); }, 20);
      expect_all_or_nothing(
          std::string(name) + " load_attention", state,
          [&] { load_attention(context, folder.path(), 1); }, 40);
    }
  }
}

}  // namespace
}  // namespace ladon::test
