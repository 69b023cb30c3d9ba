// Philox against the known answers of Random123, and the streams and fills made from it.
#include "ladon/random.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "ladon/tensor.h"
#include "support/error_of.h"
#include "support/host_context.h"

namespace ladon {
namespace {

using test::error_of;
using test::host_context;
using Words = std::array<std::uint32_t, 4>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

TEST(Philox, GivesTheKnownAnswers) {
  // kat_vectors of Random123: philox4x32-10.
  EXPECT_EQ(philox({0, 0, 0, 0}, 0), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, 0xffffffffffffffff),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0x299f31d0a4093822),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Random, DrawsTheBlocksOfItsStreamInOrder) {
  Random random(7, 0x500000009);
  for (std::uint32_t position = 0; position < 3; ++position) {
    for (const std::uint32_t word : philox({position, 0, 9, 5}, 7)) {
      EXPECT_EQ(random.next_u32(), word);
    }
  }
  Random pairs(0);
  EXPECT_EQ(pairs.next_u64(), 0xe169c58d6627e8d5);
  EXPECT_EQ(pairs.next_u64(), 0x9b00dbd8bc57ac4c);
}

TEST(Random, StreamsAndSeedsDiffer) {
  std::set<std::uint64_t> seen;
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    for (std::uint64_t stream = 0; stream < 10; ++stream) {
      seen.insert(Random(seed, stream).next_u64());
    }
  }
  EXPECT_EQ(seen.size(), 100U);
}

TEST(Random, UniformFillsItsRangeEvenly) {
  Random random(3);
  std::array<int, 10> counts{};
  for (int i = 0; i < 100000; ++i) {
    const double value = random.uniform();
    ASSERT_GE(value, 0);
    ASSERT_LT(value, 1);
    ++counts[static_cast<std::size_t>(value * 10)];
  }
  for (const int count : counts) EXPECT_NEAR(count, 10000, 500);  // five deviations are 474
  for (int i = 0; i < 1000; ++i) {
    const double value = random.uniform(-3, -2);
    ASSERT_GE(value, -3);
    ASSERT_LE(value, -2);
  }
}

TEST(Random, NormalHasTheRightMoments) {
  Random random(4);
  constexpr int kCount = 100000;
  double sum = 0;
  double squares = 0;
  double fourths = 0;
  for (int i = 0; i < kCount; ++i) {
    const double value = random.normal();
    ASSERT_TRUE(std::isfinite(value));
    sum += value;
    squares += value * value;
    fourths += value * value * value * value;
  }
  EXPECT_NEAR(sum / kCount, 0, 0.02);
  EXPECT_NEAR(squares / kCount, 1, 0.03);
  EXPECT_NEAR(fourths / kCount, 3, 0.2);
}

TEST(Random, BelowIsEvenAndInRange) {
  Random random(5);
  std::array<int, 7> counts{};
  for (int i = 0; i < 70000; ++i) ++counts[static_cast<std::size_t>(random.below(7))];
  for (const int count : counts) EXPECT_NEAR(count, 10000, 500);
  EXPECT_EQ(random.below(1), 0);
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
  bool upper_half = false;
  for (int i = 0; i < 64; ++i) {
    const std::int64_t value = random.below(kHuge);
    ASSERT_GE(value, 0);
    ASSERT_LT(value, kHuge);
    upper_half = upper_half || value > kHuge / 2;
  }
  EXPECT_TRUE(upper_half);
}

TEST(Fill, AnElementDependsOnItsIndexAlone) {
  Tensor whole(DType::kF64, {5, 6, 7});
  fill_normal(host_context(), whole, 1, 2, 11, 3);
  // The same numbers whatever the shape, the strides or the length.
  Tensor flat(DType::kF64, {100});
  fill_normal(host_context(), flat, 1, 2, 11, 3);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(flat.data_as<double>()[i], whole.data_as<double>()[i]);
  Tensor storage(DType::kF64, {7, 5, 12});
  const TensorView strided = storage.view().slice(2, 3, 9).transpose(0, 2).transpose(0, 1);
  ASSERT_EQ(strided.shape(), whole.shape());
  fill_normal(host_context(), strided, 1, 2, 11, 3);
  const Tensor dense = Tensor::copy_of(host_context(), strided);
  for (int i = 0; i < 210; ++i) {
    EXPECT_EQ(dense.data_as<double>()[i], whole.data_as<double>()[i]);
  }
  EXPECT_EQ(storage.data_as<double>()[0], 0);  // outside of the view
  // And in a narrower dtype they are the same numbers, rounded.
  Tensor narrow(DType::kBF16, {5, 6, 7});
  fill_normal(host_context(), narrow, 1, 2, 11, 3);
  for (int i = 0; i < 210; ++i) {
    EXPECT_EQ(narrow.data_as<bfloat16>()[i].bits, bfloat16(whole.data_as<double>()[i]).bits);
  }
}

TEST(Fill, UniformStaysInItsRangeAndHasItsMean) {
  Tensor tensor(DType::kF32, {100000});
  fill_uniform(host_context(), tensor, -2, 6, 1);
  double sum = 0;
  for (int i = 0; i < 100000; ++i) {
    const float value = tensor.data_as<float>()[i];
    ASSERT_GE(value, -2.0F);
    ASSERT_LE(value, 6.0F);
    sum += static_cast<double>(value);
  }
  EXPECT_NEAR(sum / 100000, 2, 0.05);
}

TEST(Fill, TakesScalarsEmptyViewsAndDegenerateRanges) {
  Tensor scalar(DType::kF64, {});
  fill_uniform(host_context(), scalar, 4, 4, 1);
  EXPECT_EQ(scalar.data_as<double>()[0], 4);
  fill_normal(host_context(), scalar, -1, 0, 1);
  EXPECT_EQ(scalar.data_as<double>()[0], -1);
  Tensor empty(DType::kF32, {3, 0});
  fill_uniform(host_context(), empty, 0, 1, 1);
  fill_normal(host_context(), empty, 0, 1, 1);
}

TEST(Fill, RefusesWhatItCannotDo) {
  Tensor bools(DType::kBool, {2});
  Tensor floats(DType::kF32, {2});
  EXPECT_EQ(error_of([&] { fill_uniform(host_context(), bools, 0, 1, 1); }),
            "fill_uniform: view: got dtype bool, expected f64, f32, f16 or bf16");
  EXPECT_EQ(error_of([&] { fill_normal(host_context(), bools, 0, 1, 1); }),
            "fill_normal: view: got dtype bool, expected f64, f32, f16 or bf16");
  EXPECT_EQ(error_of([&] { fill_uniform(host_context(), TensorView(), 0, 1, 1); }),
            "fill_uniform: view: got none, expected a tensor");
  const TensorView cuda(floats.data(), DType::kF32, {2}, Device::kCuda);
  EXPECT_EQ(error_of([&] { fill_normal(host_context(), cuda, 0, 1, 1); }),
            "fill_normal: view: got memory of cuda:0, expected memory of cpu, where the call runs");
  const TensorView repeated(floats.data(), DType::kF32, {3, 2}, {0, 1});
  EXPECT_EQ(
      error_of([&] { fill_normal(host_context(), repeated, 0, 1, 1); }),
      "fill_normal: view: got strides [0, 1] that reach one element twice, expected an output "
      "without overlap");
  EXPECT_EQ(error_of([] {
              fill_uniform(host_context(), TensorView(nullptr, DType::kF32, {2}), 0, 1, 1);
            }),
            "fill_uniform: view: got a null pointer, expected data");
  EXPECT_EQ(error_of([&] { fill_uniform(host_context(), floats, kNan, 1, 1); }),
            "fill_uniform: low: got nan, expected a finite number");
  EXPECT_EQ(error_of([&] { fill_uniform(host_context(), floats, 0, kInfinity, 1); }),
            "fill_uniform: high: got inf, expected a finite number");
  EXPECT_EQ(error_of([&] { fill_uniform(host_context(), floats, -1.7e308, 1.7e308, 1); }),
            "fill_uniform: high - low: got inf, expected a finite number");
  EXPECT_EQ(error_of([&] { fill_uniform(host_context(), floats, 1, 0, 1); }),
            "fill_uniform: high: got 0.000000, expected low = 1.000000 or more");
  EXPECT_EQ(error_of([&] { fill_normal(host_context(), floats, -kInfinity, 1, 1); }),
            "fill_normal: mean: got -inf, expected a finite number");
  EXPECT_EQ(error_of([&] { fill_normal(host_context(), floats, 0, kNan, 1); }),
            "fill_normal: deviation: got nan, expected a finite number");
  EXPECT_EQ(error_of([&] { fill_normal(host_context(), floats, 0, -1, 1); }),
            "fill_normal: deviation: got -1.000000, expected 0 or more");
}

}  // namespace
}  // namespace ladon
