// Hopper's forward kernel with rules beyond a scale and a window gives the bits of the generic one,
// and is the one that runs.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "cuda/hopper_kernels.h"
#include "ladon/attention.h"
#include "ladon/graph.h"
#include "support/run_case.h"

namespace ladon::test {
namespace {

struct HeadDims {
  std::int64_t head;
  std::int64_t value;
};
// One for each kernel.
constexpr HeadDims kHeadDims[] = {{64, 64}, {128, 128}, {192, 128}, {256, 256}};

struct NamedRules {
  std::string name;
  AttentionOptions options;
};

class CudaHopperRules : public HopperKernelsTest {
 protected:
  void SetUp() override {
    HopperKernelsTest::SetUp();
    if (IsSkipped()) return;
    slopes_ = normal(DType::kF32, {kHeads}, 11, 0.05);
    growing_slopes_ = Tensor(DType::kF32, {kHeads});
    std::fill_n(growing_slopes_.data_as<float>(), kHeads, -0.125F);  // far keys have more weight
    growing_slopes_ = growing_slopes_.to(context());
    mask_ = Tensor(DType::kBool, {1, 1, kLength, kLength});
    Random random(5, 0);
    auto* const may_see = static_cast<unsigned char*>(mask_.data());
    for (std::int64_t i = 0; i < mask_.num_elements(); ++i) {
      may_see[i] = static_cast<unsigned char>(random.below(3) != 0);
    }
    mask_ = mask_.to(context());
    bias_ = normal(DType::kBF16, {1, kHeads, kLength, kLength}, 12);
    float_bias_ = normal(DType::kF32, {1, 1, kLength, kLength}, 13);
    context().synchronize();
  }

  /// Each rule alone, and some together.
  std::vector<NamedRules> all_rules() const {
    std::vector<NamedRules> all{
        {"softcap", {.causal = true, .softcap = 5}},
        {"alibi", {.causal = true, .alibi_slopes = slopes_}},
        {"growing alibi", {.alibi_slopes = growing_slopes_}},
        {"mask", {.mask = mask_}},
        {"bias", {.causal = true, .bias = bias_}},
        {"f32 bias", {.bias = float_bias_}},
        {"dropout", {.causal = true, .dropout = {.probability = 0.3, .seed = 9}}},
        {"dropout from key 3", {.dropout = {.probability = 0.3, .seed = 9, .first_key = 3}}},
        {"negative scale", {.scale = -0.1, .causal = true}},
    };
    all.push_back({"all",
                   {.scale = 0.2,
                    .causal = true,
                    .window_left = 1000,
                    .mask = mask_,
                    .bias = bias_,
                    .softcap = 8,
                    .alibi_slopes = slopes_,
                    .dropout = {.probability = 0.1, .seed = 3}}});
    return all;
  }

  static constexpr std::int64_t kHeads = 4;
  static constexpr std::int64_t kLength = 1536;  // three segments of keys

  Tensor slopes_, growing_slopes_, mask_, bias_, float_bias_;
};

/// How many kernels and fills a call is.
std::int64_t nodes_of(const Context& context, const Tensor& q, const Tensor& k, const Tensor& v,
                      const AttentionOptions& options) {
  Tensor out(context, q.dtype(), {q.size(0), q.size(1), q.size(2), v.size(3)});
  Graph graph(context);
  // What describes the call is uploaded the first time.
  for (int i = 0; i < 2; ++i) graph.run([&] { attention(context, q, k, v, options, out); });
  context.synchronize();
  return graph.statistics().num_nodes;
}

/// The generic kernel is one launch; Hopper's is followed by one for tiles with NaN, and its
/// counters are set to 0 first.
TEST_F(CudaHopperRules, EveryRuleRunsOnHoppersKernelWithTheSameBits) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const auto [dim, value_dim] : kHeadDims) {
      const Tensor q = normal(dtype, {2, kLength, kHeads, dim}, 1);
      const Tensor k = normal(dtype, {2, kLength, 2, dim}, 2);
      const Tensor v = normal(dtype, {2, kLength, 2, value_dim}, 3);
      context().synchronize();
      for (const NamedRules& rules : all_rules()) {
        SCOPED_TRACE(rules.name + ", heads of " + std::to_string(dim) + ", " + name_of(dtype));
        EXPECT_EQ(nodes_of(*hopper_, q, k, v, rules.options),
                  nodes_of(*generic_, q, k, v, rules.options) + 2);
        const Tensor fast = attention(*hopper_, q, k, v, rules.options);
        EXPECT_TRUE(same_bits(fast, attention(*generic_, q, k, v, rules.options)));
        EXPECT_TRUE(same_bits(fast, attention(*hopper_, q, k, v, rules.options)));
      }
    }
  }
}

/// A rule or several, of every shape that Hopper's kernel takes, or nearly.
Case random_rules_case(Random& random, int index) {
  const auto pick = [&](std::int64_t low, std::int64_t high) {
    return low + random.below(high - low + 1);
  };
  constexpr std::int64_t kGroups[] = {1, 2, 3, 4};
  constexpr std::int64_t kDims[] = {40, 64, 72, 96, 120, 128, 136, 160, 192, 200, 256};
  constexpr DType kFloats[] = {DType::kBF16, DType::kF16, DType::kF32, DType::kF64};
  Case c;
  c.batch = pick(1, 2);
  c.query_len = pick(1, 10) > 2 ? pick(64, 300) : pick(1, 64);
  c.kv_len = pick(1, 3) == 1 ? c.query_len : pick(1, 900);
  if (pick(0, 1) == 0) c.kv_len = (c.kv_len + 7) / 8 * 8;  // rows of masks are aligned
  c.num_kv_heads = pick(1, 2);
  c.num_heads = c.num_kv_heads * kGroups[pick(0, 3)];
  c.head_dim = kDims[pick(0, std::size(kDims) - 1)];
  c.value_dim = pick(1, 4) == 1 ? kDims[pick(0, std::size(kDims) - 1)] : c.head_dim;
  if (pick(1, 4) == 1) c.value_dim = std::min<std::int64_t>(c.value_dim, 128);
  c.dtype = c.kv_dtype = pick(0, 1) == 0 ? DType::kBF16 : DType::kF16;
  c.causal = pick(0, 1) == 0;
  c.alignment = pick(0, 1) == 0 ? Alignment::kBottomRight : Alignment::kTopLeft;
  if (pick(0, 3) == 0) c.window_left = pick(0, 600);
  if (!c.causal && pick(0, 3) == 0) c.window_right = pick(0, 300);
  c.lengths = static_cast<Lengths>(pick(0, 2));
  c.sinks = pick(0, 3) == 0;
  c.memory = pick(0, 2) == 0 ? Memory::kHeadsFirst : Memory::kDense;
  c.seed = static_cast<std::uint64_t>(pick(1, 1 << 20));
  const auto has = [&](int rule) {
    return index % 8 == rule || (index % 8 > 5 && pick(0, 1) == 0);
  };
  const auto broadcast = [&] {
    Broadcast some{.present = true};
    for (bool& full : some.full) full = pick(0, 2) != 0;
    return some;
  };
  if (has(0)) c.softcap = static_cast<double>(pick(1, 40)) / 2;
  if (has(1)) c.alibi = true;
  if (has(2)) c.mask = broadcast();
  if (has(3)) c.bias = broadcast();
  c.bias_dtype = kFloats[pick(0, 3)];
  if (has(4)) c.dropout = 0.25;
  if (has(5)) c.scale = -static_cast<double>(pick(0, 20)) / 40;
  if (pick(0, 3) == 0) make_shard(random, c);
  return c;
}

TEST_F(CudaHopperRules, RandomCasesHaveTheSameBits) {
  for (int i = 0; i < repetitions(480); ++i) {
    Random random(17, static_cast<std::uint64_t>(i));
    const CaseData data(random_rules_case(random, i));
    const CaseResults fast = run(*hopper_, data);
    const CaseResults expected = run(*generic_, data);
    ASSERT_TRUE(same_bits(fast, expected)) << i << ": " << data.problem().describe();
  }
}

TEST_F(CudaHopperRules, WithinTheBound) {
  for (int i = 0; i < repetitions(24); ++i) {
    Random random(18, static_cast<std::uint64_t>(i));
    Case problem = random_rules_case(random, i);
    problem.batch = 1;  // the reference takes its time
    problem.num_heads = problem.num_heads / problem.num_kv_heads;
    problem.num_kv_heads = 1;
    const CaseData data(problem);
    EXPECT_EQ(check_case(*hopper_, data, truth_of(data)), "") << data.problem().describe();
  }
}

/// Rows that a mask or a bias of -inf keeps from NaN and infinity do not have them, the others do.
TEST_F(CudaHopperRules, InfinityAndNanReachTheRowsThatSeeThem) {
  constexpr std::int64_t kRows = 300;
  constexpr std::int64_t kSeeing = 100;  // rows from here on see the token
  for (const auto [dim, value_dim] : kHeadDims) {
    const Tensor q = normal(DType::kBF16, {1, kRows, kHeads, dim}, 1);
    const Tensor k = normal(DType::kBF16, {1, kRows, 2, dim}, 2);
    const Tensor v = normal(DType::kBF16, {1, kRows, 2, value_dim}, 3);
    for (const std::int64_t token : {std::int64_t{0}, std::int64_t{131}, kRows - 1}) {
      Tensor mask(DType::kBool, {1, 1, kRows, kRows});
      Tensor bias(DType::kF32, {1, 1, kRows, kRows});
      auto* const may_see = static_cast<unsigned char*>(mask.data());
      for (std::int64_t i = 0; i < mask.num_elements(); ++i) {
        may_see[i] = static_cast<unsigned char>(i % kRows != token || i / kRows >= kSeeing);
        bias.data_as<float>()[i] = may_see[i] != 0 ? 0.5F : -std::numeric_limits<float>::infinity();
      }
      const Tensor device_mask = mask.to(context());
      const Tensor device_bias = bias.to(context());
      context().synchronize();
      for (const NamedRules& rules :
           {NamedRules{"mask", {.mask = device_mask, .softcap = 20}},
            NamedRules{"bias", {.bias = device_bias}},
            NamedRules{"mask and dropout",
                       {.mask = device_mask, .dropout = {.probability = 0.5, .seed = 2}}}}) {
        for (const float value :
             {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
          SCOPED_TRACE(rules.name + ", token " + std::to_string(token) + " of " +
                       std::to_string(value) + ", heads of " + std::to_string(dim));
          const Tensor keys = with_token(context(), k, token, value);
          const Tensor values = with_token(context(), v, token, value);
          const Tensor fast = attention(*hopper_, q, keys, values, rules.options);
          EXPECT_TRUE(same_bits(fast, attention(*generic_, q, keys, values, rules.options)));
          EXPECT_TRUE(same_bits(attention(*hopper_, q, k, values, rules.options),
                                attention(*generic_, q, k, values, rules.options)));
          const Context host;
          Tensor out(DType::kF32, fast.shape());
          copy(host, fast.to_host(), out);
          const std::int64_t columns = kHeads * value_dim;
          const auto* const first = out.data_as<float>();
          const auto is_finite = [](float x) { return std::isfinite(x); };
          EXPECT_TRUE(std::all_of(first, first + kSeeing * columns, is_finite));
          EXPECT_TRUE(std::none_of(first + kSeeing * columns, first + kRows * columns, is_finite));
        }
      }
    }
  }
}

}  // namespace
}  // namespace ladon::test
