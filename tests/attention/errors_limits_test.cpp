// Sizes that a view may have and no memory holds: views that repeat their elements, and empty ones.
// The calls must refuse them with an Error, and have written nothing.
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "ladon/attention.h"
#include "support/error_of.h"
#include "support/isas.h"

namespace ladon::test {
namespace {

constexpr std::int64_t kOne = 1;

class AttentionLimits : public testing::TestWithParam<Isa> {
 protected:
  /// A view of a few numbers, each of them many times.
  TensorView repeated(const Dims& shape) {
    Dims strides = shape;
    for (int dim = 0; dim < shape.rank(); ++dim) strides[dim] = 0;
    strides[shape.rank() - 1] = shape.rank() == 4 ? 1 : 0;
    return {numbers_, DType::kF32, shape, strides};
  }

  float numbers_[64] = {};
  Context context_{ContextOptions{.num_threads = 2, .isa = GetParam()}};
};

INSTANTIATE_TEST_SUITE_P(Isas, AttentionLimits, testing::ValuesIn(runnable_isas()), isa_test_name);

TEST_P(AttentionLimits, SequencesThatCannotBeCounted) {
  // 2^61 sequences of no queries: the bytes of the library's own list of them overflow to 0.
  const TensorView empty = repeated({kOne << 61, 0, 1, 1});
  error_of([&] { attention(context_, empty, empty, empty, {}, empty); }, ErrorCode::kOutOfMemory);
}

TEST_P(AttentionLimits, AnyNumberOfHeadsWithoutQueriesIsNothingToDo) {
  const TensorView q = repeated({1, 0, kOne << 60, 1});
  const TensorView k = repeated({1, 0, 1, 1});
  const AttentionOptions options{.sinks = repeated({kOne << 60})};
  EXPECT_NO_THROW(attention(context_, q, k, k, options, q));
}

TEST_P(AttentionLimits, NoMemoryForBackwardLeavesGradientsAlone) {
  if (GetParam() == Isa::kReference) GTEST_SKIP() << "it needs little memory and years";
  const std::int64_t query_len = kOne << 42;
  const TensorView q = repeated({1, query_len, 1, 8});
  const TensorView k = repeated({1, 3, 1, 8});
  const std::int64_t lengths[] = {2};
  std::vector<float> dk(3 * 8, 7.0F);
  const AttentionGradients gradients{.dk = TensorView(dk.data(), DType::kF32, {1, 3, 1, 8})};
  error_of(
      [&] {
        attention_backward(context_, q, k, k, {.kv_lengths = lengths},
                           {q, repeated({1, 1, query_len}), q, {}}, gradients);
      },
      ErrorCode::kOutOfMemory);
  EXPECT_EQ(dk, std::vector<float>(dk.size(), 7.0F));
}

TEST_P(AttentionLimits, TheLastNumberOfASequence) {
  const TensorView q = repeated({1, 1, 1, 8});
  AttentionOptions options;
  options.dropout = {
      .probability = 0.5, .seed = 1, .first_sequence = std::numeric_limits<std::int64_t>::max()};
  EXPECT_NO_THROW(static_cast<void>(attention(context_, q, q, q, options)));
  // The second of two has no number.
  const TensorView two = repeated({2, 1, 1, 8});
  const std::string message =
      error_of([&] { static_cast<void>(attention(context_, two, two, two, options)); });
  EXPECT_NE(message.find("attention: dropout.first_sequence: got 9223372036854775807"),
            std::string::npos)
      << message;
}

// The library must not even multiply them: run with the undefined-behaviour sanitizer.
TEST_P(AttentionLimits, StridesOfASingleElementMeanNothing) {
  const std::int64_t kHuge = kOne << 62;
  std::vector<float> expected;
  for (const std::int64_t stride : {std::int64_t{8}, kHuge}) {
    for (const std::int64_t kv_len : {5, 0}) {
      std::vector<float> rows(5 * 8);
      for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = 0.1F * static_cast<float>(i % 7);
      const auto view = [&](std::vector<float>& data, std::int64_t tokens) {
        return TensorView(data.data(), DType::kF32, {1, tokens, 1, 8},
                          {stride, tokens == 1 ? stride : 8, stride, 1});
      };
      std::vector<float> out(8), lse(1), dout(8, 1.0F), dq(8), dk(5 * 8), dv(5 * 8);
      const TensorView q = view(rows, 1);
      const TensorView k = view(rows, kv_len);
      const TensorView lse_view(lse.data(), DType::kF32, {1, 1, 1}, {stride, stride, stride});
      attention(context_, q, k, k, {}, view(out, 1), lse_view);
      attention_backward(context_, q, k, k, {}, {view(out, 1), lse_view, view(dout, 1), {}},
                         {.dq = view(dq, 1), .dk = view(dk, kv_len), .dv = view(dv, kv_len)});
      if (kv_len == 0) {
        EXPECT_EQ(out, std::vector<float>(8, 0.0F));
        EXPECT_EQ(dq, std::vector<float>(8, 0.0F));
        continue;
      }
      std::vector<float> results = out;
      for (const auto& part : {lse, dq, dk, dv}) {
        results.insert(results.end(), part.begin(), part.end());
      }
      if (stride != kHuge) expected = results;
      EXPECT_EQ(results, expected);
      EXPECT_GT(out[1], 0);
    }
  }
}

TEST_P(AttentionLimits, MergeOfRowsWithoutValues) {
  const Tensor part(DType::kF32, {2, 3, 4, 0});
  const Tensor part_lse(DType::kF32, {2, 4, 3});
  Tensor out(DType::kF32, {2, 3, 4, 0});
  Tensor lse(DType::kF32, {2, 4, 3});
  const ConstTensorView outs[] = {part, part};
  const ConstTensorView lses[] = {part_lse, part_lse};
  EXPECT_NO_THROW(merge_attention(context_, outs, lses, out, lse));
  EXPECT_NEAR(lse.data_as<float>()[0], 0.693147F, 1e-6F);
}

}  // namespace
}  // namespace ladon::test
