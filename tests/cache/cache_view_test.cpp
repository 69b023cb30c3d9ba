// KvCacheView is plain data that anyone may fill in: attention() over it checks every field.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cache/cache_support.h"
#include "support/error_of.h"
#include "support/host_context.h"

namespace ladon::test {
namespace {

/// A paged cache of two sequences, put together by hand.
class CacheViewErrors : public testing::Test {
 protected:
  CacheViewErrors() {
    view_.num_kv_heads = 2;
    view_.head_dim = 4;
    view_.value_dim = 4;
    view_.num_slots = 12;
    view_.k = k_.data();
    view_.v = v_.data();
    view_.k_slot_stride = view_.v_slot_stride = 8;
    view_.k_head_stride = view_.v_head_stride = 4;
    view_.page_size = 3;
    view_.sequences = sequences_;
  }

  std::string message(const AttentionOptions& options = {}) {
    return error_of([&] { attention(context_, q_, view_, options, out_); });
  }

  const Context context_;
  const Tensor k_ = random_tensor(DType::kF32, {12, 2, 4}, 1);
  const Tensor v_ = random_tensor(DType::kF32, {12, 2, 4}, 2);
  Tensor q_ = random_tensor(DType::kF32, {2, 1, 4, 4}, 3);
  Tensor out_{DType::kF32, {2, 1, 4, 4}};
  std::vector<std::int32_t> pages_ = {3, 0, 1, 2};
  std::vector<KvSequenceView> sequences_ = {{.length = 5, .pages = pages_.data()},
                                            {.length = 6, .pages = pages_.data() + 2}};
  KvCacheView view_;
};

TEST_F(CacheViewErrors, HandMadePagesAreRead) {
  attention(context_, q_, view_, {.causal = true}, out_);
  for (std::int64_t b = 0; b < 2; ++b) {
    const std::int64_t length = sequences_[static_cast<std::size_t>(b)].length;
    Tensor k(DType::kF32, {1, length, 2, 4});
    Tensor v(DType::kF32, {1, length, 2, 4});
    for (std::int64_t j = 0; j < length; ++j) {
      const std::int64_t slot = slot_in(view_, sequences_[static_cast<std::size_t>(b)], j);
      copy(host_context(), k_.view().select(0, slot), k.view().select(0, 0).select(0, j));
      copy(host_context(), v_.view().select(0, slot), v.view().select(0, 0).select(0, j));
    }
    const Tensor truth = attention(context_, q_.view().slice(0, b, b + 1), k, v);
    EXPECT_LE(
        relative_difference(Tensor::copy_of(host_context(), out_.view().slice(0, b, b + 1)), truth),
        1e-6);
  }
}

TEST_F(CacheViewErrors, Sizes) {
  view_.num_kv_heads = 3;
  EXPECT_EQ(message(), "attention: cache: got 3 KV heads, expected a divisor of q's 4 heads");
  view_.num_kv_heads = 2;
  view_.head_dim = 5;
  EXPECT_EQ(message(), "attention: cache: got a head_dim of 5, expected q's 4");
  view_.head_dim = 4;
  view_.value_dim = 0;
  EXPECT_EQ(message(), "attention: cache: got a value_dim of 0, expected 1 or more");
  view_.value_dim = 4;
  view_.sequences = std::span(sequences_).first(1);
  EXPECT_EQ(message(), "attention: cache: got 1 sequences, expected q's 2");
}

TEST_F(CacheViewErrors, Storage) {
  view_.format = DType::kI32;
  EXPECT_EQ(message(), "attention: cache: got dtype i32, expected a float dtype, i8 or f8e4m3");
  view_.format = DType::kF64;
  EXPECT_EQ(message(),
            "attention: cache: got dtype f64, expected a narrower one for queries of f32");
  view_.format = DType::kI8;
  EXPECT_EQ(
      message(),
      "attention: cache: got dtype i8 without scales, expected scales with i8 and f8e4m3 only");
  view_.format = DType::kF32;
  const float scale = 1;
  view_.k_scales = &scale;
  EXPECT_EQ(message(),
            "attention: cache: got dtype f32 with scales, expected scales with i8 and f8e4m3 only");
  view_.k_scales = nullptr;
  view_.v = nullptr;
  EXPECT_NE(message().find("attention: cache.v: "), std::string::npos);
}

TEST_F(CacheViewErrors, Scales) {
  const Tensor bytes(DType::kI8, {12, 2, 4});
  const Tensor scales(DType::kF32, {25});
  view_.format = DType::kI8;
  view_.k = view_.v = bytes.data();
  view_.k_scales = view_.v_scales = scales.data_as<float>();
  view_.scale_slot_stride = 2;
  view_.scale_head_stride = 1;
  attention(context_, q_, view_, {}, out_);
  view_.scale_head_stride = -1;
  EXPECT_EQ(message(), "attention: cache.k_scales: got strides of 2 and -1, expected none below 0");
  view_.scale_head_stride = 1;
  view_.scale_slot_stride = -2;
  EXPECT_EQ(message(), "attention: cache.k_scales: got strides of -2 and 1, expected none below 0");
  view_.scale_slot_stride = std::int64_t{1} << 62;
  EXPECT_NE(message().find("address space"), std::string::npos);
  view_.scale_slot_stride = 2;
  view_.v_scales = reinterpret_cast<const float*>(static_cast<const char*>(scales.data()) + 1);
  EXPECT_NE(message().find("attention: cache.v_scales: "), std::string::npos);
}

TEST_F(CacheViewErrors, StridesOfASingleElementMeanNothing) {
  const Tensor q = random_tensor(DType::kF32, {2, 1, 4, 4}, 3);
  std::vector<double> expected;
  for (const std::int64_t stride : {std::int64_t{4}, std::int64_t{1} << 62}) {
    view_.num_kv_heads = 1;
    view_.k_head_stride = view_.v_head_stride = stride;
    attention(context_, q, view_, {}, out_);
    if (stride == 4) expected = elements_of(out_);
    EXPECT_EQ(elements_of(out_), expected);
  }
}

TEST_F(CacheViewErrors, Layout) {
  view_.ring_slots = 4;
  EXPECT_EQ(message(),
            "attention: cache: got a page_size of 3 and 4 ring_slots, expected one of them, or "
            "none");
  view_.ring_slots = 0;
  pages_[1] = 4;
  EXPECT_EQ(message(), "attention: cache: sequence 0: got page 4 at index 1, expected 0 to 3");
  pages_[1] = -1;
  EXPECT_EQ(message(), "attention: cache: sequence 0: got page -1 at index 1, expected 0 to 3");
  pages_[1] = 0;
  sequences_[1].pages = nullptr;
  EXPECT_EQ(message(), "attention: cache: sequence 1: got no pages, expected a page table");
  sequences_[1].length = -2;
  EXPECT_EQ(message(), "attention: cache: sequence 1: got a length of -2, expected 0 to 2^56");
  view_.page_size = 0;
  sequences_[1] = {.length = 6, .first_slot = 7};
  EXPECT_EQ(message(),
            "attention: cache: sequence 1: got 6 keys from slot 7 on, expected them within 12 "
            "slots");
  view_.ring_slots = 5;
  sequences_[0] = {.length = 5, .first_slot = 0, .ring_start = 5};
  EXPECT_EQ(message(),
            "attention: cache: sequence 0: got a ring_start of 5, expected a slot of the ring");
  sequences_[0].length = 6;
  EXPECT_EQ(message(),
            "attention: cache: sequence 0: got 6 keys from slot 0 on, expected them within a ring "
            "of 5 of 12 slots");
}

TEST_F(CacheViewErrors, Options) {
  const std::vector<std::int64_t> two = {1, 1};
  const std::vector<std::int64_t> offsets = {0, 1, 2};
  EXPECT_EQ(message({.kv_lengths = two}),
            "attention: kv_lengths: got some together with a cache, expected none because a cache "
            "has its "
            "own");
  EXPECT_EQ(message({.kv_offsets = offsets}),
            "attention: kv_offsets: got some together with a cache, expected none because a cache "
            "has its "
            "own");
  EXPECT_EQ(message({.query_offsets = offsets}),
            "attention: q: got a batch of 2, expected 1 in a packed batch");
  EXPECT_EQ(
      message({.alignment = Alignment::kTopLeft}),
      "attention: alignment: got another together with a cache, expected kBottomRight: its newest "
      "tokens are the queries");
  const TensorView inside(const_cast<void*>(k_.data()), DType::kF32, {2, 1, 4, 4});
  const std::string overlap = error_of([&] { attention(context_, q_, view_, {}, inside); });
  EXPECT_NE(overlap.find("attention: out: "), std::string::npos) << overlap;
}

}  // namespace
}  // namespace ladon::test
