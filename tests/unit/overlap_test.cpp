// overlaps() and overlaps_itself() against the plain truth: a list of all bytes.
#include "core/overlap.h"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <vector>

#include "ladon/random.h"
#include "ladon/tensor.h"

namespace ladon {
namespace {

/// The first byte of every element, one entry for each index.
std::vector<std::intptr_t> element_addresses(const ConstTensorView& view) {
  std::vector<std::intptr_t> addresses;
  if (view.num_elements() == 0) return addresses;
  addresses.push_back(reinterpret_cast<std::intptr_t>(view.data()));
  for (int dim = 0; dim < view.rank(); ++dim) {
    std::vector<std::intptr_t> grown;
    for (const std::intptr_t address : addresses) {
      for (std::int64_t i = 0; i < view.size(dim); ++i) {
        grown.push_back(address +
                        static_cast<std::intptr_t>(size_of(view.dtype())) * i * view.stride(dim));
      }
    }
    addresses = grown;
  }
  return addresses;
}

std::set<std::intptr_t> bytes_of(const ConstTensorView& view) {
  std::set<std::intptr_t> bytes;
  for (const std::intptr_t address : element_addresses(view)) {
    for (std::size_t i = 0; i < size_of(view.dtype()); ++i) {
      bytes.insert(address + static_cast<std::intptr_t>(i));
    }
  }
  return bytes;
}

bool overlaps_by_force(const ConstTensorView& a, const ConstTensorView& b) {
  const std::set<std::intptr_t> bytes = bytes_of(a);
  for (const std::intptr_t byte : bytes_of(b)) {
    if (bytes.contains(byte)) return true;
  }
  return false;
}

bool overlaps_itself_by_force(const ConstTensorView& view) {
  const std::vector<std::intptr_t> all = element_addresses(view);
  return std::set<std::intptr_t>(all.begin(), all.end()).size() != all.size();
}

/// A small view somewhere in memory that is never touched.
ConstTensorView random_view(Random& random, std::byte* memory, std::int64_t spread,
                            std::int64_t longest_stride) {
  constexpr std::array<DType, 5> kDtypes{DType::kF64, DType::kF32, DType::kF16, DType::kBF16,
                                         DType::kBool};
  const auto rank = static_cast<std::size_t>(random.below(5));
  std::array<std::int64_t, 4> sizes{};
  std::array<std::int64_t, 4> strides{};
  for (std::size_t dim = 0; dim < rank; ++dim) {
    sizes[dim] = random.below(20) == 0 ? 0 : 1 + random.below(4);
    strides[dim] = random.below(2 * longest_stride + 1) - longest_stride;
  }
  return {memory + random.below(spread), kDtypes[static_cast<std::size_t>(random.below(5))],
          Dims(std::span<const std::int64_t>(sizes.data(), rank)),
          Dims(std::span<const std::int64_t>(strides.data(), rank))};
}

TEST(Overlap, AgreesWithBruteForceOnRandomViews) {
  std::vector<std::byte> memory(1 << 16);
  Random random(1);
  std::array<int, 2> answers{};
  for (int i = 0; i < 20000; ++i) {
    // From crowded, where most meet, to spread out and sparse, where few do.
    const std::int64_t spread = 1 + random.below(2000);
    const std::int64_t longest_stride = 1 + random.below(100);
    std::byte* const middle = memory.data() + memory.size() / 2;
    const ConstTensorView a = random_view(random, middle, spread, longest_stride);
    const ConstTensorView b = random_view(random, middle, spread, longest_stride);
    const bool expected = overlaps_by_force(a, b);
    ++answers[expected ? 1 : 0];
    ASSERT_EQ(overlaps(a, b), expected)
        << a.shape().to_string() << a.strides().to_string() << name_of(a.dtype()) << " and "
        << b.shape().to_string() << b.strides().to_string() << name_of(b.dtype()) << ", number "
        << i;
    ASSERT_EQ(overlaps(b, a), expected);
  }
  EXPECT_GT(answers[0], 2000);
  EXPECT_GT(answers[1], 2000);
}

TEST(Overlap, OfOneViewAgreesWithBruteForce) {
  std::vector<std::byte> memory(1 << 16);
  Random random(2);
  std::array<int, 2> answers{};
  for (int i = 0; i < 20000; ++i) {
    const ConstTensorView view =
        random_view(random, memory.data() + memory.size() / 2, 1, 1 + random.below(60));
    const bool expected = overlaps_itself_by_force(view);
    ++answers[expected ? 1 : 0];
    ASSERT_EQ(overlaps_itself(view), expected)
        << view.shape().to_string() << view.strides().to_string() << ", number " << i;
  }
  EXPECT_GT(answers[0], 2000);
  EXPECT_GT(answers[1], 2000);
}

TEST(Overlap, PartsOfAPackedBufferAreApart) {
  Tensor packed(DType::kF16, {2, 128, 3, 8, 64});
  const TensorView q = packed.view().select(2, 0);
  const TensorView k = packed.view().select(2, 1);
  const TensorView v = packed.view().select(2, 2);
  EXPECT_FALSE(overlaps(q, k));
  EXPECT_FALSE(overlaps(k, v));
  EXPECT_FALSE(overlaps(q, v));
  EXPECT_TRUE(overlaps(q, packed));
  EXPECT_TRUE(overlaps(q, q));
  EXPECT_FALSE(overlaps_itself(q));
  // The same through other dimension orders.
  EXPECT_FALSE(overlaps(q.transpose(1, 2), k));
  EXPECT_FALSE(overlaps_itself(q.transpose(0, 3)));
}

TEST(Overlap, HeadsAndOddSlicesOfOneTensor) {
  Tensor tensor(DType::kF32, {3, 17, 5, 12});
  const TensorView view = tensor.view();
  EXPECT_FALSE(overlaps(view.slice(3, 0, 5), view.slice(3, 5, 12)));
  EXPECT_TRUE(overlaps(view.slice(3, 0, 6), view.slice(3, 5, 12)));
  EXPECT_FALSE(overlaps(view.slice(2, 1, 2), view.slice(2, 2, 4)));
  EXPECT_FALSE(overlaps(view.select(0, 0), view.select(0, 1)));
}

TEST(Overlap, EmptyAbsentAndForeignViewsMeetNothing) {
  Tensor tensor(DType::kF32, {4, 4});
  const TensorView view = tensor.view();
  EXPECT_FALSE(overlaps(view, view.slice(0, 2, 2)));
  EXPECT_FALSE(overlaps(view, ConstTensorView()));
  EXPECT_FALSE(overlaps(ConstTensorView(), ConstTensorView()));
  EXPECT_FALSE(overlaps(view, TensorView(tensor.data(), DType::kF32, {4, 4}, Device::kCuda)));
  EXPECT_FALSE(overlaps_itself(ConstTensorView()));
  EXPECT_FALSE(overlaps_itself(view.slice(0, 1, 1)));
}

TEST(Overlap, NeighboursThatShareNoByteAreApart) {
  std::array<std::byte, 64> memory{};
  const ConstTensorView a(memory.data(), DType::kF64, {2});
  EXPECT_FALSE(overlaps(a, ConstTensorView(memory.data() + 16, DType::kF64, {2})));
  EXPECT_TRUE(overlaps(a, ConstTensorView(memory.data() + 15, DType::kBool, {1})));
  EXPECT_FALSE(overlaps(a, ConstTensorView(memory.data() + 16, DType::kBool, {1})));
}

TEST(Overlap, BroadcastsAndWindowsShareTheirOwnMemory) {
  Tensor tensor(DType::kF32, {16});
  EXPECT_TRUE(overlaps_itself(TensorView(tensor.data(), DType::kF32, {2, 4}, {0, 1})));
  EXPECT_TRUE(overlaps_itself(TensorView(tensor.data(), DType::kF32, {4, 4}, {1, 1})));
  EXPECT_FALSE(overlaps_itself(TensorView(tensor.data(), DType::kF32, {1, 4}, {0, 1})));
  EXPECT_FALSE(overlaps_itself(TensorView(tensor.data(), DType::kF32, {2, 2, 2}, {2, -4, 1})));
}

TEST(Overlap, HugeAndHopelessViewsGetAnAnswer) {
  std::vector<std::byte> memory(1 << 16);
  std::byte* const start = memory.data();
  constexpr std::int64_t kHuge = std::int64_t{1} << 58;
  const ConstTensorView huge(start, DType::kF64, {2, 2}, {kHuge / 8, -kHuge / 8});
  EXPECT_TRUE(overlaps(huge, huge));
  EXPECT_TRUE(overlaps_itself(huge));
  // Even strides throughout, and a distance that is odd: settled by the gcd.
  const Dims shape{1000, 1000, 1000, 1000};
  const ConstTensorView even(start, DType::kBool, shape, {2002, 2006, 2018, 2022});
  const ConstTensorView odd(start + 1, DType::kBool, shape, {2002, 2006, 2018, 2022});
  EXPECT_FALSE(overlaps(even, odd));
  // A subset-sum problem, made to have no solution and no short proof of that: the search gives up
  // and says true, which refuses a call but never lets a wrong one through.
  const Dims threes{3, 3, 3, 3, 3, 3, 3, 3};
  const ConstTensorView hard_a(start, DType::kBool, threes,
                               {100003, 100019, 100043, 100049, 100057, 100069, 100103, 100109});
  const ConstTensorView hard_b(start + 50000, DType::kBool, threes,
                               {100129, 100151, 100153, 100169, 100183, 100189, 100193, 100207});
  EXPECT_FALSE(overlaps_by_force(hard_a, hard_b));
  EXPECT_TRUE(overlaps(hard_a, hard_b));
}

}  // namespace
}  // namespace ladon
