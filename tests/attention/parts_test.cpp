// Calls over a part of a larger problem: some of the keys, queries or heads. With a position offset
// and dropout's numbers they give the whole's results.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention/attend.h"
#include "ladon/attention.h"
#include "ladon/random.h"
#include "support/contexts.h"
#include "support/host_context.h"

namespace ladon::test {
namespace {

constexpr std::int64_t kBatch = 2;
constexpr std::int64_t kQueries = 37;
constexpr std::int64_t kKeys = 210;
constexpr std::int64_t kHeads = 6;
constexpr std::int64_t kKvHeads = 2;
constexpr std::int64_t kOffset = kKeys - kQueries;  // bottom-right

class AttentionParts : public ContextTest {
 protected:
  void make(DType dtype) {
    q_ = normal(dtype, {kBatch, kQueries, kHeads, 12}, 1);
    k_ = normal(dtype, {kBatch, kKeys, kKvHeads, 12}, 2);
    v_ = normal(dtype, {kBatch, kKeys, kKvHeads, 10}, 3);
    bias_ = normal(DType::kF32, {1, kHeads, kQueries, kKeys}, 4);
    slopes_ = there(Tensor::from_values(DType::kF64, {kHeads}, {0.5, 0.25, 0.1, 0.05, 0.02, 0.01}));
    dout_ = normal(dtype, {kBatch, kQueries, kHeads, 10}, 5);
    out_ = Tensor(context_, dtype, {kBatch, kQueries, kHeads, 10});
    lse_ = Tensor(context_, DType::kF64, {kBatch, kHeads, kQueries});
    attention(context_, q_, k_, v_, options(), out_, lse_);
  }

  /// Every rule that depends on positions or indices.
  AttentionOptions options() const {
    return {.causal = true,
            .window_left = 120,
            .bias = bias_,
            .alibi_slopes = slopes_,
            .dropout = {.probability = 0.3, .seed = 9}};
  }

  void expect_near(const ConstTensorView& got, const ConstTensorView& expected, double relative,
                   const char* what) {
    const std::vector<double> a = elements_of(context_, got);
    const std::vector<double> b = elements_of(context_, expected);
    ASSERT_EQ(a.size(), b.size());
    for (std::size_t i = 0; i < a.size(); ++i) {
      ASSERT_NEAR(a[i], b[i], relative * (1 + std::abs(b[i]))) << what << " at " << i;
    }
  }

  Tensor q_, k_, v_, bias_, slopes_, dout_, out_, lse_;
};

LADON_FOR_EACH_CONTEXT(AttentionParts);

TEST_P(AttentionParts, KeysInShards) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    make(dtype);
    const DType sums = dtype == DType::kBF16 ? DType::kF32 : dtype;
    const std::int64_t borders[] = {0, 3, 81, 170, kKeys};
    std::vector<Tensor> outs, lses;
    for (std::size_t i = 0; i + 1 < std::size(borders); ++i) {
      const std::int64_t begin = borders[i];
      const std::int64_t end = borders[i + 1];
      AttentionOptions shard = options();
      shard.position_offset = kOffset - begin;
      shard.dropout.first_key = begin;
      shard.bias = bias_.view().slice(3, begin, end);
      outs.emplace_back(context_, sums, out_.shape());
      lses.emplace_back(context_, DType::kF64, lse_.shape());
      attention(context_, q_, k_.view().slice(1, begin, end), v_.view().slice(1, begin, end), shard,
                outs.back(), lses.back());
    }
    Tensor merged(context_, dtype, out_.shape());
    Tensor lse(context_, DType::kF64, lse_.shape());
    const std::vector<ConstTensorView> out_views(outs.begin(), outs.end());
    const std::vector<ConstTensorView> lse_views(lses.begin(), lses.end());
    merge_attention(context_, out_views, lse_views, merged, lse);
    const double wide = dtype == DType::kF64 ? 1e-13 : 1e-5;
    expect_near(merged, out_, dtype == DType::kBF16 ? 0x1p-7 : wide, "out");
    expect_near(lse, lse_, wide, "lse");
  }
}

TEST_P(AttentionParts, QueriesInShards) {
  make(DType::kF32);
  const auto zeros = [&](const Tensor& like) {
    return Tensor(context_, DType::kF32, like.shape());
  };
  Tensor dq = zeros(q_), dk = zeros(k_), dv = zeros(v_);
  attention_backward(context_, q_, k_, v_, options(), {.out = out_, .lse = lse_, .dout = dout_},
                     {.dq = dq, .dk = dk, .dv = dv});
  std::vector<double> dk_sum(static_cast<std::size_t>(k_.num_elements()));
  const std::int64_t borders[] = {0, 1, 20, kQueries};
  for (std::size_t i = 0; i + 1 < std::size(borders); ++i) {
    const std::int64_t begin = borders[i];
    const std::int64_t end = borders[i + 1];
    AttentionOptions shard = options();
    shard.position_offset = kOffset + begin;
    shard.dropout.first_query = begin;
    shard.bias = bias_.view().slice(2, begin, end);
    const ConstTensorView q = q_.view().slice(1, begin, end);
    Tensor out(context_, DType::kF32, {kBatch, end - begin, kHeads, 10});
    Tensor lse(context_, DType::kF32, {kBatch, kHeads, end - begin});
    attention(context_, q, k_, v_, shard, out, lse);
    expect_near(out, out_.view().slice(1, begin, end), 1e-5, "out");
    Tensor part_dq(context_, DType::kF32, q.shape());
    Tensor part_dk = zeros(k_);
    attention_backward(context_, q, k_, v_, shard,
                       {.out = out, .lse = lse, .dout = dout_.view().slice(1, begin, end)},
                       {.dq = part_dq, .dk = part_dk});
    expect_near(part_dq, dq.view().slice(1, begin, end), 1e-5, "dq");
    const std::vector<double> terms = elements_of(part_dk);
    for (std::size_t j = 0; j < terms.size(); ++j) dk_sum[j] += terms[j];
  }
  const std::vector<double> expected = elements_of(dk);
  for (std::size_t j = 0; j < expected.size(); ++j) ASSERT_NEAR(dk_sum[j], expected[j], 1e-4) << j;
}

TEST_P(AttentionParts, HeadsInShardsHaveTheSameBits) {
  make(DType::kF32);
  for (std::int64_t kv_head = 0; kv_head < kKvHeads; ++kv_head) {
    const std::int64_t first = kv_head * kHeads / kKvHeads;
    const std::int64_t end = first + kHeads / kKvHeads;
    AttentionOptions shard = options();
    shard.dropout.first_head = first;
    shard.bias = bias_.view().slice(1, first, end);
    shard.alibi_slopes = slopes_.view().slice(0, first, end);
    Tensor out(context_, DType::kF32, {kBatch, kQueries, end - first, 10});
    attention(context_, q_.view().slice(2, first, end), k_.view().slice(2, kv_head, kv_head + 1),
              v_.view().slice(2, kv_head, kv_head + 1), shard, out);
    EXPECT_TRUE(same_bits(out, out_.view().slice(2, first, end))) << "KV head " << kv_head;
  }
}

TEST_P(AttentionParts, GradientsOf16BitInputsMayBeF32) {
  make(DType::kBF16);
  const auto gradients_in = [&](DType dtype) {
    std::vector<Tensor> all;
    for (const Tensor* like : {&q_, &k_, &v_}) all.emplace_back(context_, dtype, like->shape());
    attention_backward(context_, q_, k_, v_, options(), {.out = out_, .lse = lse_, .dout = dout_},
                       {.dq = all[0], .dk = all[1], .dv = all[2]});
    return all;
  };
  const std::vector<Tensor> narrow = gradients_in(DType::kBF16);
  const std::vector<Tensor> wide = gradients_in(DType::kF32);
  for (std::size_t i = 0; i < 3; ++i) {
    const Tensor rounded = Tensor::copy_of(context_, wide[i], DType::kBF16);
    EXPECT_TRUE(same_bits(rounded, narrow[i])) << i;
  }
}

// A part that knows its whole has the whole's bits, however few rows it has.
TEST_P(AttentionParts, PartsOfAWholeHaveItsBits) {
  struct Sizes {
    std::int64_t queries, keys;
  };
  for (const auto& [queries, keys] : {Sizes{300, 1100}, Sizes{21, 1100}, Sizes{2, 1300}}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const Tensor q = normal(dtype, {1, queries, 4, 24}, 1);
      const Tensor k = normal(dtype, {1, keys, 1, 24}, 2);
      const Tensor v = normal(dtype, {1, keys, 1, 24}, 3);
      const Tensor sinks = normal(DType::kF32, {4}, 4);
      Tensor out(context_, dtype, {1, queries, 4, 24});
      AttentionOptions options{.causal = true, .window_left = 600, .sinks = sinks};
      attention(context_, q, k, v, options, out);
      for (const std::int64_t length : {1, 3, 16, 100}) {
        const std::int64_t begin = std::max<std::int64_t>(0, queries - length - 1);
        const std::int64_t end = std::min(begin + length, queries);
        options.position_offset = keys - queries + begin;
        Tensor part(context_, dtype, {1, end - begin, 2, 24});
        options.sinks = sinks.view().slice(0, 1, 3);  // two of the four heads
        attend(context_, q.view().slice(1, begin, end).slice(2, 1, 3), k, v, options, part, {},
               {.query_len = queries, .first_query = begin, .group = 4});
        EXPECT_TRUE(same_bits(part, out.view().slice(1, begin, end).slice(2, 1, 3)))
            << name_of(dtype) << ' ' << begin << " to " << end << " of " << queries;
        options.position_offset = {};
        options.sinks = sinks;
      }
    }
  }
}

}  // namespace
}  // namespace ladon::test
