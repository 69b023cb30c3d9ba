// Communicator over threads: the collectives, their sums and statistics.
#include "ladon/communicator.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "ladon/random.h"
#include "ladon/tensor.h"
#include "parallel/ranks.h"
#include "support/error_of.h"
#include "support/host_context.h"

namespace ladon::test {
namespace {

/// Different on every rank.
Tensor own_tensor(int rank, DType dtype, const Dims& shape) {
  Tensor tensor(dtype, shape);
  fill_normal(host_context(), tensor, 0, 1, 7, static_cast<std::uint64_t>(rank));
  return tensor;
}

bool same_bytes(const ConstTensorView& a, const ConstTensorView& b) {
  const Tensor x = Tensor::copy_of(host_context(), a);
  const Tensor y = Tensor::copy_of(host_context(), b);
  return x.num_elements() == y.num_elements() &&
         std::memcmp(x.data(), y.data(),
                     static_cast<std::size_t>(x.num_elements()) * size_of(x.dtype())) == 0;
}

TEST(Communicator, AllGatherBringsEveryPart) {
  for (const int count : rank_counts()) {
    expect_all_return(run_ranks(count, [&](Communicator& communicator) {
      const Tensor part = own_tensor(communicator.rank(), DType::kBF16, {3, 5});
      Tensor all(DType::kBF16, {count, 3, 5});
      all_gather(host_context(), communicator, part, all);
      for (int r = 0; r < count; ++r) {
        EXPECT_TRUE(same_bytes(all.view().select(0, r), own_tensor(r, DType::kBF16, {3, 5}))) << r;
      }
      EXPECT_EQ(communicator.statistics().bytes_sent, (count - 1) * 3 * 5 * 2);
      EXPECT_EQ(communicator.statistics().bytes_received, (count - 1) * 3 * 5 * 2);
      EXPECT_EQ(communicator.statistics().messages_sent, count - 1);
    }));
  }
}

TEST(Communicator, AllToAllTransposesRanks) {
  for (const int count : rank_counts()) {
    expect_all_return(run_ranks(count, [&](Communicator& communicator) {
      const Tensor parts = own_tensor(communicator.rank(), DType::kF32, {count, 4});
      Tensor received(DType::kF32, {count, 4});
      all_to_all(host_context(), communicator, parts, received);
      for (int r = 0; r < count; ++r) {
        const Tensor theirs = own_tensor(r, DType::kF32, {count, 4});
        EXPECT_TRUE(
            same_bytes(received.view().select(0, r), theirs.view().select(0, communicator.rank())));
      }
      EXPECT_EQ(communicator.statistics().bytes_sent, (count - 1) * 4 * 4);
    }));
  }
}

/// The sum in the order of ranks, in the dtype itself.
template <class T>
std::vector<T> ordered_sum(int count, DType dtype, const Dims& shape) {
  std::vector<T> sum;
  for (int r = 0; r < count; ++r) {
    const Tensor term = own_tensor(r, dtype, shape);
    const T* data = term.data_as<T>();
    if (r == 0) sum.assign(data, data + term.num_elements());
    for (std::size_t i = 0; r > 0 && i < sum.size(); ++i) sum[i] += data[i];
  }
  return sum;
}

TEST(Communicator, SumsAreInTheOrderOfRanks) {
  for (const int count : rank_counts()) {
    constexpr std::int64_t kLength = 11;  // not divisible
    const std::vector<float> expected = ordered_sum<float>(count, DType::kF32, {count, kLength});
    const std::vector<double> wide = ordered_sum<double>(count, DType::kF64, {kLength});
    expect_all_return(run_ranks(count, [&](Communicator& communicator) {
      const int rank = communicator.rank();
      const Tensor parts = own_tensor(rank, DType::kF32, {count, kLength});
      Tensor sum(DType::kF32, {kLength});
      reduce_scatter(host_context(), communicator, parts, sum);
      const float* first = expected.data() + rank * kLength;
      EXPECT_EQ(std::vector<float>(sum.data_as<float>(), sum.data_as<float>() + kLength),
                std::vector<float>(first, first + kLength));
      EXPECT_EQ(communicator.statistics().bytes_sent, (count - 1) * kLength * 4);

      communicator.reset_statistics();
      const Tensor terms = own_tensor(rank, DType::kF64, {kLength});
      Tensor total(DType::kF64, {kLength});
      all_reduce(host_context(), communicator, terms, total);
      EXPECT_EQ(std::vector<double>(total.data_as<double>(), total.data_as<double>() + kLength),
                wide);
      const std::int64_t share = kLength * (rank + 1) / count - kLength * rank / count;
      EXPECT_EQ(communicator.statistics().bytes_sent,
                8 * (kLength - share) + 8 * (count - 1) * share);
    }));
  }
}

TEST(Communicator, StridedViewsAndEmptyOnes) {
  expect_all_return(run_ranks(3, [](Communicator& communicator) {
    const Tensor part = own_tensor(communicator.rank(), DType::kF32, {4, 6});
    Tensor all(DType::kF32, {3, 6, 4});
    all_gather(host_context(), communicator, part.view().transpose(0, 1), all);
    const Tensor last = own_tensor(2, DType::kF32, {4, 6});
    EXPECT_TRUE(same_bytes(all.view().select(0, 2), last.view().transpose(0, 1)));
    const Tensor nothing(DType::kF32, {0});
    Tensor still_nothing(DType::kF32, {0});
    all_reduce(host_context(), communicator, nothing, still_nothing);
    barrier(communicator);
  }));
}

TEST(Communicator, SplitMakesGroupsInTheOrderOfKeys) {
  expect_all_return(run_ranks(7, [](Communicator& communicator) {
    const int rank = communicator.rank();
    const auto group = communicator.split(rank % 2, -rank);
    EXPECT_EQ(group->size(), rank % 2 == 0 ? 4 : 3);
    EXPECT_EQ(group->rank(), (rank % 2 == 0 ? 6 - rank : 5 - rank) / 2);
    const Tensor part = Tensor::from_values(DType::kF32, {1}, {static_cast<double>(rank)});
    Tensor all(DType::kF32, {group->size(), 1});
    all_gather(host_context(), *group, part, all);
    for (int i = 0; i < group->size(); ++i) {
      EXPECT_EQ(all.data_as<float>()[i], static_cast<float>((rank % 2 == 0 ? 6 : 5) - 2 * i));
    }
    barrier(communicator);  // the old one still works
  }));
}

TEST(Communicator, NegativeColorsAreRefused) {
  expect_all_return(run_ranks(2, [](Communicator& communicator) {
    error_of([&] { communicator.split(-1 + communicator.rank(), 0); },
             communicator.rank() == 0 ? ErrorCode::kInvalidArgument : ErrorCode::kCommunication);
  }));
}

TEST(Communicator, BadArgumentsAreRefusedOnAllRanks) {
  const RankErrors errors = run_ranks(2, [](Communicator& communicator) {
    const Tensor part(DType::kF32, {2});
    Tensor all(DType::kF32, {communicator.rank() == 0 ? 2 : 3, 2});
    const ErrorCode code =
        communicator.rank() == 0 ? ErrorCode::kCommunication : ErrorCode::kInvalidArgument;
    const std::string message =
        error_of([&] { all_gather(host_context(), communicator, part, all); }, code);
    EXPECT_EQ(message, communicator.rank() == 0
                           ? "all_gather: call 1 of rank 0: rank 1 refused the call: all_gather: "
                             "all: got [3, 2], expected [2, 2]"
                           : "all_gather: all: got [3, 2], expected [2, 2]");
    const Tensor halves(DType::kF16, {2, 2});
    Tensor sum(DType::kF16, {2});
    EXPECT_EQ(error_of([&] { reduce_scatter(host_context(), communicator, halves, sum); }),
              "reduce_scatter: parts: got dtype f16, expected f32 or f64, which sums are kept in");
    barrier(communicator);
  });
  expect_all_return(errors);
  EXPECT_EQ(error_of([] { make_thread_communicators(0); }),
            "make_thread_communicators: count: got 0, expected 1 to 4096");
  EXPECT_EQ(
      error_of([] { make_thread_communicators(1, {.deadline = std::chrono::milliseconds(0)}); }),
      "Communicator: deadline: got 0 ms, expected more than 0");
}

}  // namespace
}  // namespace ladon::test
