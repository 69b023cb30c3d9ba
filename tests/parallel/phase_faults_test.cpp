// A rank that brings other arguments, throws or stops in the middle of prefill, decoding or
// backward, by every scheme: all ranks get an Error within the deadline, and neither results nor
// caches nor gradients have changed on any of them. (SIGKILL and SIGSTOP: mpi_faults.cpp.)
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "ladon/context_parallel.h"
#include "ladon/spread_cache.h"
#include "ladon/tensor_parallel.h"
#include "parallel/layer_support.h"
#include "parallel/ranks.h"
#include "support/error_of.h"

namespace ladon::test {
namespace {

using std::chrono::milliseconds;

constexpr int kRanks = 3;
constexpr std::int64_t kTokens = 96;  // of each rank
constexpr std::int64_t kEmbed = 24;
constexpr std::int64_t kPrompt = 1200;  // three splits
constexpr std::int64_t kChunk = 40;     // more rows than a tile: several tasks for each split

/// One rank's part of a phase: a call that can be repeated, and what it may change.
class Phase {
 public:
  virtual ~Phase() = default;
  /// With `odd`, brings another argument than the other ranks.
  virtual void call(const Context& context, bool odd) = 0;
  /// Lengths of caches, and a hash of each tensor that the call writes to.
  virtual std::string state() const = 0;

 protected:
  static std::string hash_of(const Tensor& tensor) {
    const std::string_view bytes(
        static_cast<const char*>(tensor.data()),
        static_cast<std::size_t>(tensor.num_elements()) * size_of(tensor.dtype()));
    return " " + std::to_string(std::hash<std::string_view>()(bytes));
  }
};

class Attention final : public Phase {
 public:
  Attention(Communicator& ranks, ContextScheme scheme, bool backward)
      : ranks_(ranks),
        backward_(backward),
        plan_(plan_context(kRanks, kRanks * kTokens, kRanks * kTokens)) {
    plan_.scheme = scheme;
    if (!backward) return;
    attend(host_context(), {});
  }

  void call(const Context& context, bool odd) override {
    AttentionOptions options;
    if (odd) options.softcap = 7;
    if (!backward_) return attend(context, options);
    context_parallel_attention_backward(context, ranks_, q_, k_, k_, options, plan_,
                                        {.out = out_, .lse = lse_, .dout = q_},
                                        {.dq = dq_, .dk = dk_, .dv = dv_});
  }
  std::string state() const override {
    std::string all;
    for (const Tensor* tensor : {&out_, &lse_, &dq_, &dk_, &dv_}) all += hash_of(*tensor);
    return all;
  }

 private:
  void attend(const Context& context, const AttentionOptions& options) {
    context_parallel_attention(context, ranks_, q_, k_, k_, options, plan_, out_, lse_);
  }

  Communicator& ranks_;
  const bool backward_;
  ContextPlan plan_;
  const Tensor q_ = normal(DType::kF32, {1, kTokens, 6, 8}, 1);
  const Tensor k_ = normal(DType::kF32, {1, kTokens, 3, 8}, 2);
  Tensor out_{DType::kF32, {1, kTokens, 6, 8}};
  Tensor lse_{DType::kF32, {1, 6, kTokens}};
  Tensor dq_{DType::kF32, {1, kTokens, 6, 8}};
  Tensor dk_{DType::kF32, {1, kTokens, 3, 8}};
  Tensor dv_{DType::kF32, {1, kTokens, 3, 8}};
};

MultiHeadAttentionOptions layer_options() {
  return {.embed_dim = kEmbed, .num_heads = 6, .num_kv_heads = 3, .head_dim = 8, .causal = true};
}

class LayerBackward final : public Phase {
 public:
  explicit LayerBackward(Communicator& ranks) : layer_(ranks, layer_options()) {
    layer_.set_whole_parameters(host_context(), MultiHeadAttention(layer_options(), 5));
    layer_.zero_grad(host_context());
    saved_ = layer_.forward_training(host_context(), {.query = x_}).saved;
  }

  void call(const Context& context, bool odd) override {
    const ConstTensorView grad = odd ? longer_.view() : x_.view();
    layer_.backward(context, grad, saved_, {.query = dx_});
  }
  std::string state() const override {
    std::string all = hash_of(dx_);
    for (const Parameter& parameter : layer_.named_parameters()) all += hash_of(parameter.gradient);
    return all;
  }

 private:
  TensorParallelAttention layer_;
  const Tensor x_ = normal(DType::kF32, {1, kTokens, kEmbed}, 1);
  const Tensor longer_ = normal(DType::kF32, {1, kTokens + 1, kEmbed}, 1);
  Tensor dx_{DType::kF32, {1, kTokens, kEmbed}};
  SavedForward saved_;
};

class LayerForward final : public Phase {
 public:
  explicit LayerForward(Communicator& ranks) : layer_(ranks, layer_options()) {
    layer_.set_whole_parameters(host_context(), MultiHeadAttention(layer_options(), 5));
  }

  void call(const Context& context, bool odd) override {
    layer_.forward_training(context, {.query = x_}, {.causal = !odd}, out_);
  }
  std::string state() const override { return hash_of(out_); }

 private:
  TensorParallelAttention layer_;
  const Tensor x_ = normal(DType::kF32, {1, kTokens, kEmbed}, 1);
  Tensor out_{DType::kF32, {1, kTokens, kEmbed}};
};

class LayerDecode final : public Phase {
 public:
  explicit LayerDecode(Communicator& ranks)
      : layer_(ranks, layer_options()),
        cache_(KvCache::contiguous(host_context(), layer_.cache_options())) {
    layer_.set_whole_parameters(host_context(), MultiHeadAttention(layer_options(), 5));
    layer_.forward(host_context(), normal(DType::kF32, {1, kPrompt, kEmbed}, 1), cache_);
  }

  void call(const Context& context, bool odd) override {
    layer_.forward(context, x_, cache_, {.causal = !odd}, out_);
  }
  std::string state() const override { return std::to_string(cache_.length()) + hash_of(out_); }

 private:
  TensorParallelAttention layer_;
  KvCache cache_;
  const Tensor x_ = normal(DType::kF32, {1, 1, kEmbed}, 2);
  Tensor out_{DType::kF32, {1, 1, kEmbed}};
};

class SpreadDecode final : public Phase {
 public:
  explicit SpreadDecode(Communicator& ranks)
      : cache_(ranks, KvCache::contiguous(host_context(), {.num_kv_heads = 3, .head_dim = 8})) {
    const Tensor k = normal(DType::kF32, {1, 4 * kPrompt, 3, 8}, 1);
    cache_.append(host_context(), k, k);
  }

  void call(const Context& context, bool odd) override {
    append_and_attend(context, cache_, q_, k_, k_, {.causal = !odd}, out_);
  }
  std::string state() const override {
    return std::to_string(cache_.length()) + " " + std::to_string(cache_.local().length()) +
           hash_of(out_);
  }

 private:
  SpreadKvCache cache_;
  const Tensor q_ = normal(DType::kF32, {1, kChunk, 6, 8}, 2);
  const Tensor k_ = normal(DType::kF32, {1, kChunk, 3, 8}, 3);
  Tensor out_{DType::kF32, {1, kChunk, 6, 8}};
};

class SpreadLatentDecode final : public Phase {
 public:
  explicit SpreadLatentDecode(Communicator& ranks)
      : layer_(ranks, options()),
        cache_(ranks, KvCache::contiguous(host_context(), layer_.cache_options())) {
    layer_.set_whole_parameters(host_context(), LatentAttention(options(), 5));
    layer_.forward(host_context(), normal(DType::kF32, {1, kPrompt, kEmbed}, 1), cache_);
  }

  void call(const Context& context, bool odd) override {
    layer_.forward(context, x_, cache_, {.causal = !odd}, out_);
  }
  std::string state() const override {
    return std::to_string(cache_.length()) + " " + std::to_string(cache_.local().length()) +
           hash_of(out_);
  }

 private:
  static LatentAttentionOptions options() {
    return {.embed_dim = kEmbed,
            .num_heads = 6,
            .kv_rank = 10,
            .nope_dim = 8,
            .rope_dim = 4,
            .causal = true};
  }

  TensorParallelLatentAttention layer_;
  SpreadKvCache cache_;
  const Tensor x_ = normal(DType::kF32, {1, kChunk, kEmbed}, 2);
  Tensor out_{DType::kF32, {1, kChunk, kEmbed}};
};

struct PhaseCase {
  const char* name;
  std::function<std::unique_ptr<Phase>(Communicator&)> make;
};

template <class Made, class... Arguments>
PhaseCase phase(const char* name, Arguments... arguments) {
  return {name, [=](Communicator& ranks) { return std::make_unique<Made>(ranks, arguments...); }};
}

class PhaseFaults : public testing::TestWithParam<PhaseCase> {};

INSTANTIATE_TEST_SUITE_P(
    Phases, PhaseFaults,
    testing::Values(phase<Attention>("prefill_all_gather", ContextScheme::kAllGather, false),
                    phase<Attention>("prefill_ring", ContextScheme::kRing, false),
                    phase<Attention>("prefill_ulysses", ContextScheme::kUlysses, false),
                    phase<Attention>("backward_all_gather", ContextScheme::kAllGather, true),
                    phase<Attention>("backward_ring", ContextScheme::kRing, true),
                    phase<Attention>("backward_ulysses", ContextScheme::kUlysses, true),
                    phase<LayerForward>("forward_layer"), phase<LayerBackward>("backward_layer"),
                    phase<LayerDecode>("decode_heads"), phase<SpreadDecode>("decode_sequence"),
                    phase<SpreadLatentDecode>("decode_latents")),
    [](const auto& tested) { return std::string(tested.param.name); });

TEST_P(PhaseFaults, AMismatchChangesNothing) {
  expect_all_return(run_ranks(kRanks, [](Communicator& communicator) {
    const std::unique_ptr<Phase> phase = GetParam().make(communicator);
    const std::string before = phase->state();
    communicator.reset_statistics();
    const bool odd = communicator.rank() == 1;
    std::string message;
    try {
      phase->call(host_context(), odd);
    } catch (const Error& error) {
      message = error.what();
      // A rank whose own arguments are wrong says so itself.
      if (!odd) {
        EXPECT_EQ(error.code(), ErrorCode::kCommunication);
      }
    }
    EXPECT_NE(message, "");
    if (!odd) {
      EXPECT_NE(message.find("rank 1"), std::string::npos) << message;
    }
    EXPECT_EQ(communicator.statistics().bytes_sent, 0);
    EXPECT_EQ(phase->state(), before);
    EXPECT_EQ(communicator.broken(), "");
    phase->call(host_context(), false);
    EXPECT_NE(phase->state(), before);
  }));
}

/// Calls what() once, in the middle of a call on the Context.
Context with_fault(std::function<void()> what) {
  auto armed = std::make_shared<std::atomic<bool>>(true);
  return Context(ContextOptions{.num_threads = 1, .check_interrupt = [armed, what] {
                                  if (armed->exchange(false)) what();
                                }});
}

/// The call of a rank with this Context, which must end with an Error.
std::string failure_of(Phase& phase, const Context& context, ErrorCode code) {
  const std::string before = phase.state();
  const std::string message = error_of([&] { phase.call(context, false); }, code);
  EXPECT_EQ(phase.state(), before);
  return message;
}

TEST_P(PhaseFaults, ARankThatThrowsEndsTheCallOnAll) {
  expect_all_return(run_ranks(kRanks, [](Communicator& communicator) {
    const std::unique_ptr<Phase> phase = GetParam().make(communicator);
    if (communicator.rank() == 1) {
      const Context faulty =
          with_fault([] { throw Error(ErrorCode::kOutOfMemory, "test: no memory"); });
      EXPECT_EQ(failure_of(*phase, faulty, ErrorCode::kOutOfMemory), "test: no memory");
      return;
    }
    const std::string message = failure_of(*phase, host_context(), ErrorCode::kCommunication);
    EXPECT_NE(message.find("test: no memory"), std::string::npos) << message;
  }));
}

TEST_P(PhaseFaults, ARankThatStopsIsFoundByTheDeadline) {
  constexpr milliseconds kDeadline(1000);
  expect_all_return(run_ranks(
      kRanks,
      [&](Communicator& communicator) {
        const std::unique_ptr<Phase> phase = GetParam().make(communicator);
        if (communicator.rank() == 1) {
          const Context stopping = with_fault([&] { std::this_thread::sleep_for(2 * kDeadline); });
          failure_of(*phase, stopping, ErrorCode::kCommunication);
          return;
        }
        const std::string message = failure_of(*phase, host_context(), ErrorCode::kCommunication);
        EXPECT_NE(message.find("sent or took nothing within 1 s"), std::string::npos) << message;
        EXPECT_FALSE(communicator.broken().empty());
      },
      kDeadline));
}

}  // namespace
}  // namespace ladon::test
