// repeat_kv(), split_heads() and merge_heads() against index arithmetic.
#include "ladon/head_ops.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <type_traits>
#include <vector>

#include "core/element.h"
#include "ladon/attention.h"
#include "support/contexts.h"
#include "support/error_of.h"

namespace ladon {
namespace {

using test::elements_of;
using test::error_of;

constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
constexpr DType kDtypes[] = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16, DType::kBool};

/// Distinct small numbers, exact in every floating dtype; on the host.
Tensor counting(DType dtype, const Dims& shape) {
  Tensor tensor(dtype, shape);
  for (std::int64_t i = 0; i < tensor.num_elements(); ++i) {
    store_element(tensor.data(), dtype, i, static_cast<double>(i % 251));
  }
  return tensor;
}

double at(const ConstTensorView& view, std::initializer_list<std::int64_t> indices) {
  return load_element(view.data(), view.dtype(), offset_of(view, indices));
}

/// A view of a whole tensor, of the host's or of the device's.
using Look = std::function<ConstTensorView(const ConstTensorView&)>;
ConstTensorView whole(const ConstTensorView& x) { return x; }

class HeadOps : public test::ContextTest {
 protected:
  Tensor counting_there(DType dtype, const Dims& shape) const {
    return there(counting(dtype, shape));
  }
  void expect_repeated(const Tensor& host, std::int64_t times, const Look& look = whole) const {
    const Tensor device = there(host);
    const ConstTensorView x = look(host);
    const Tensor result = repeat_kv(context_, look(device), times).to_host();
    ASSERT_EQ(result.dtype(), x.dtype());
    ASSERT_EQ(result.shape(), (Dims{x.size(0), x.size(1), x.size(2) * times, x.size(3)}));
    for (std::int64_t b = 0; b < result.size(0); ++b) {
      for (std::int64_t t = 0; t < result.size(1); ++t) {
        for (std::int64_t h = 0; h < result.size(2); ++h) {
          for (std::int64_t d = 0; d < result.size(3); ++d) {
            ASSERT_EQ(at(result, {b, t, h, d}), at(x, {b, t, h / times, d}))
                << name_of(x.dtype()) << " times " << times << " at " << b << ", " << t << ", " << h
                << ", " << d;
          }
        }
      }
    }
  }
  void expect_merged(const Tensor& host, const Look& look = whole) const {
    const Tensor device = there(host);
    const ConstTensorView x = look(host);
    const Tensor result = merge_heads(context_, look(device)).to_host();
    ASSERT_EQ(result.dtype(), x.dtype());
    ASSERT_EQ(result.shape(), (Dims{x.size(0), x.size(1), x.size(2) * x.size(3)}));
    for (std::int64_t b = 0; b < result.size(0); ++b) {
      for (std::int64_t t = 0; t < result.size(1); ++t) {
        for (std::int64_t c = 0; c < result.size(2); ++c) {
          ASSERT_EQ(at(result, {b, t, c}), at(x, {b, t, c / x.size(3), c % x.size(3)}))
              << name_of(x.dtype()) << " at " << b << ", " << t << ", " << c;
        }
      }
    }
  }
};
class RepeatKv : public HeadOps {};
class MergeHeads : public HeadOps {};
LADON_FOR_EACH_CONTEXT(HeadOps);
LADON_FOR_EACH_CONTEXT(RepeatKv);
LADON_FOR_EACH_CONTEXT(MergeHeads);

TEST_P(RepeatKv, EqualsIndexArithmetic) {
  for (const DType dtype : kDtypes) {
    const Tensor x = counting(dtype, {2, 3, 4, 5});
    for (const std::int64_t times : {1, 2, 3, 7}) expect_repeated(x, times);
  }
}

TEST_P(RepeatKv, ReadsThroughStrides) {
  const Tensor x = counting(DType::kBF16, {2, 3, 4, 5});
  const auto by = [&](std::int64_t times, const Look& look) { expect_repeated(x, times, look); };
  // [batch, heads, seq, dim] in memory; a last stride that is not 1; a part; all in reverse.
  by(3, [](const ConstTensorView& all) { return all.transpose(1, 2); });
  by(2, [](const ConstTensorView& all) { return all.transpose(1, 3); });
  by(2,
     [](const ConstTensorView& all) { return all.slice(1, 1, 3).slice(2, 1, 3).slice(3, 2, 4); });
  by(2, [](const ConstTensorView& all) {
    return ConstTensorView(element_at(all.data(), DType::kBF16, 119), DType::kBF16, {2, 3, 4, 5},
                           {-60, -20, -5, -1}, all.device());
  });
}

TEST_P(RepeatKv, EmptyIsLegal) {
  EXPECT_EQ(repeat_kv(context_, Tensor(context_, DType::kF32, {2, 0, 3, 4}), 5).shape(),
            (Dims{2, 0, 15, 4}));
  EXPECT_EQ(repeat_kv(context_, Tensor(context_, DType::kF32, {0, 2, 0, 4}), 5).shape(),
            (Dims{0, 2, 0, 4}));
}

TEST_P(RepeatKv, Refuses) {
  const Tensor x(context_, DType::kF32, {1, 2, 3, 4});
  const auto refusal = [&](const ConstTensorView& view, std::int64_t times,
                           ErrorCode code = ErrorCode::kInvalidArgument) {
    return error_of([&] { repeat_kv(context_, view, times); }, code);
  };
  EXPECT_EQ(refusal({}, 2), "repeat_kv: x: got none, expected a tensor");
  EXPECT_EQ(refusal(x.view().select(0, 0), 2),
            "repeat_kv: x: got [2, 3, 4], expected 4 dimensions");
  EXPECT_EQ(refusal(x, 0),
            "repeat_kv: times: got 0 for 3 heads, expected 1 or more, and a product that fits 64 "
            "bits");
  EXPECT_EQ(refusal(x, -2),
            "repeat_kv: times: got -2 for 3 heads, expected 1 or more, and a product that fits 64 "
            "bits");
  EXPECT_EQ(refusal(x, kMax / 2),
            "repeat_kv: times: got 4611686018427387903 for 3 heads, expected 1 or more, and a "
            "product that fits 64 bits");
  EXPECT_EQ(refusal(x, kMax / 4, ErrorCode::kOutOfMemory),
            "Tensor: shape: got [1, 2, 6917529027641081853, 4] of f32, expected a size that fits "
            "the address space");
  const ConstTensorView null(nullptr, DType::kF32, {1, 2, 3, 4}, context_.device());
  EXPECT_EQ(refusal(null, 2), "repeat_kv: x: got a null pointer, expected data");
  const ConstTensorView elsewhere(x.data(), DType::kF32, {1, 2, 3, 4}, {Device::kCuda, 5});
  EXPECT_EQ(refusal(elsewhere, 2), "repeat_kv: x: got memory of cuda:5, expected memory of " +
                                       context_.device().to_string() + ", where the call runs");
}

// split_heads() makes a view and touches no memory: that of the host serves. HeadOps.RoundTrips
// has it on devices too.
TEST(SplitHeads, SharesMemory) {
  Tensor x = counting(DType::kF32, {2, 3, 12});
  const TensorView split = split_heads(x, 4);
  EXPECT_EQ(split.data(), x.data());
  EXPECT_EQ(split.dtype(), DType::kF32);
  EXPECT_EQ(split.shape(), (Dims{2, 3, 4, 3}));
  EXPECT_EQ(split.strides(), (Dims{36, 12, 3, 1}));
  for (std::int64_t c = 0; c < 12; ++c)
    EXPECT_EQ(at(split, {1, 2, c / 3, c % 3}), at(x, {1, 2, c}));
  split.data_as<float>()[offset_of(split, {1, 2, 3, 1})] = -1;
  EXPECT_EQ(at(x, {1, 2, 10}), -1);

  const Tensor& constant = x;
  static_assert(std::is_same_v<decltype(split_heads(x, 4)), TensorView>);
  static_assert(std::is_same_v<decltype(split_heads(x.view(), 4)), TensorView>);
  static_assert(std::is_same_v<decltype(split_heads(constant, 4)), ConstTensorView>);
  EXPECT_EQ(split_heads(constant, 4).data(), x.data());
  EXPECT_EQ(split_heads(constant, 4).strides(), split.strides());
}

TEST(SplitHeads, KeepsOuterStrides) {
  // The keys of a packed [q, k, v] projection, every second token, last first.
  const Tensor packed = counting(DType::kF16, {2, 6, 30});
  const auto* const start = packed.data_as<float16>() + 5 * 30 + 10;
  const ConstTensorView keys(start, DType::kF16, {2, 3, 10}, {180, -60, 1});
  const ConstTensorView split = split_heads(keys, 5);
  EXPECT_EQ(split.data(), start);
  EXPECT_EQ(split.strides(), (Dims{180, -60, 2, 1}));
  for (std::int64_t c = 0; c < 10; ++c) {
    EXPECT_EQ(at(split, {1, 2, c / 2, c % 2}), at(packed, {1, 1, 10 + c}));
  }
  // One head, as many heads as numbers, and a width of 1, whose stride means nothing.
  EXPECT_EQ(split_heads(keys, 1).shape(), (Dims{2, 3, 1, 10}));
  EXPECT_EQ(split_heads(keys, 10).strides(), (Dims{180, -60, 1, 1}));
  EXPECT_EQ(split_heads(packed.view().transpose(1, 2).slice(2, 3, 4), 1).strides(),
            (Dims{180, 1, 1, 1}));
  EXPECT_EQ(split_heads(Tensor(DType::kF32, {2, 0, 12}), 3).shape(), (Dims{2, 0, 3, 4}));
}

TEST(SplitHeads, Refuses) {
  Tensor x(DType::kF32, {2, 3, 12});
  EXPECT_EQ(error_of([] { split_heads(TensorView(), 2); }),
            "split_heads: x: got none, expected a tensor");
  EXPECT_EQ(error_of([&] { split_heads(x.view().select(0, 0), 2); }),
            "split_heads: x: got [3, 12], expected 3 dimensions");
  EXPECT_EQ(error_of([&] { split_heads(x.view().transpose(1, 2), 3); }),
            "split_heads: x: got a last stride of 12, expected 1");
  EXPECT_EQ(error_of([&] { split_heads(x, 0); }),
            "split_heads: num_heads: got 0, expected 1 or more");
  EXPECT_EQ(error_of([&] { split_heads(x, -3); }),
            "split_heads: num_heads: got -3, expected 1 or more");
  EXPECT_EQ(error_of([&] { split_heads(x, 5); }),
            "split_heads: num_heads: got 5, expected a divisor of x's width, which is 12");
}

TEST_P(MergeHeads, EqualsIndexArithmetic) {
  for (const DType dtype : kDtypes) expect_merged(counting(dtype, {2, 3, 4, 5}));
}

TEST_P(MergeHeads, ReadsThroughStrides) {
  const Tensor x = counting(DType::kF32, {2, 3, 4, 5});
  expect_merged(x, [](const ConstTensorView& all) { return all.transpose(1, 2); });
  expect_merged(x, [](const ConstTensorView& all) { return all.transpose(1, 3); });
  expect_merged(x, [](const ConstTensorView& all) { return all.slice(2, 1, 3).slice(3, 1, 4); });
  expect_merged(x, [](const ConstTensorView& all) {
    return ConstTensorView(all.data(), DType::kF32, {2, 3, 4, 5}, {60, 20, 0, 1}, all.device());
  });
  EXPECT_EQ(merge_heads(context_, Tensor(context_, DType::kF32, {2, 0, 3, 4})).shape(),
            (Dims{2, 0, 12}));
}

TEST_P(MergeHeads, Refuses) {
  EXPECT_EQ(error_of([&] { merge_heads(context_, {}); }),
            "merge_heads: x: got none, expected a tensor");
  EXPECT_EQ(error_of([&] {
              merge_heads(context_, Tensor(context_, DType::kF32, {2, 3, 4}));
            }),
            "merge_heads: x: got [2, 3, 4], expected 4 dimensions");
}

TEST_P(HeadOps, RoundTrips) {
  for (const DType dtype : kDtypes) {
    const Tensor x = counting_there(dtype, {2, 5, 24});
    for (const std::int64_t heads : {1, 3, 24}) {
      EXPECT_TRUE(same_bits(merge_heads(context_, split_heads(x, heads)), x));
    }
    const Tensor split = counting_there(dtype, {2, 5, 3, 8});
    const Tensor merged = merge_heads(context_, split);
    EXPECT_TRUE(same_bits(Tensor::copy_of(context_, split_heads(merged, 3)), split));
    EXPECT_TRUE(same_bits(repeat_kv(context_, split, 1), split));
  }
}

class RepeatedKv : public HeadOps {
 protected:
  /// The largest difference between grouped queries and repeated heads; -1 where all bits are
  /// equal.
  double difference(DType dtype, std::int64_t query_len) const {
    const Tensor q = normal(dtype, {2, query_len, 6, 24}, 1);
    const Tensor k = normal(dtype, {2, 83, 2, 24}, 2);
    const Tensor v = normal(dtype, {2, 83, 2, 16}, 3);
    const AttentionOptions options{.causal = true};
    const Tensor grouped = attention(context_, q, k, v, options);
    const Tensor repeated =
        attention(context_, q, repeat_kv(context_, k, 3), repeat_kv(context_, v, 3), options);
    if (same_bits(grouped, repeated)) return -1;
    const std::vector<double> left = elements_of(grouped);
    const std::vector<double> right = elements_of(repeated);
    double largest = 0;
    for (std::size_t i = 0; i < left.size(); ++i) {
      largest = std::max(largest, std::abs(left[i] - right[i]));
    }
    return largest;
  }
};
LADON_FOR_EACH_CONTEXT(RepeatedKv);

// A group's heads are rows of one matrix, so the number of rows of a KV head, by which kernels are
// chosen, is three times that of the repeated form. One token (3 rows and 1) and many (210 and 70)
// go to the same kernel either way, and then the bits are the same.
TEST_P(RepeatedKv, GivesTheBitsOfGroupedQueriesOfOneTokenAndOfMany) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
    EXPECT_EQ(difference(dtype, 1), -1) << name_of(dtype);
    EXPECT_EQ(difference(dtype, 70), -1) << name_of(dtype);
  }
}

// 15 rows go to a kernel that sums in another order than the one for 5.
TEST_P(RepeatedKv, IsWithinRoundingOfGroupedQueriesInBetween) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
    EXPECT_LT(difference(dtype, 5), 8 * epsilon_of(dtype)) << name_of(dtype);
  }
}

}  // namespace
}  // namespace ladon
