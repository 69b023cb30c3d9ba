// A GPU's memory: what is allocated is apart from everything else, and all of it comes back.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <utility>
#include <vector>

#include "cuda/cuda_test.h"
#include "ladon/attention.h"
#include "ladon/random.h"

namespace ladon::test {
namespace {

constexpr double kMiB = 1 << 20;

double free_mib() { return static_cast<double>(list_devices().devices[0].free_bytes) / kMiB; }

/// A tensor that is filled with one number, its own.
struct Numbered {
  Tensor tensor;
  double number = 0;
};

void expect_whole(const Numbered& one) {
  for (const double element : elements_of(one.tensor)) ASSERT_EQ(element, one.number);
}

/// Allocations and frees in random order through two Contexts. Each tensor is checked before it
/// goes, some by a copy that another Context makes while it is freed.
void allocate_at_random(std::uint64_t seed, int allocations) {
  const Context contexts[] = {cuda_context(), cuda_context()};
  Random random(seed);
  std::vector<Numbered> held;
  for (int i = 0; i < allocations; ++i) {
    const Context& context = contexts[random.below(2)];
    // Mostly small, some of many pages.
    const std::int64_t limit = std::int64_t{1} << (4 + random.below(random.below(8) == 0 ? 20 : 9));
    Numbered made{Tensor::uninitialized(context, DType::kF32, {1 + random.below(limit)}),
                  static_cast<double>(i)};
    fill_uniform(context, made.tensor, made.number, made.number, 0);
    context.synchronize();
    held.push_back(std::move(made));
    while (held.size() > 60 || (!held.empty() && random.below(3) == 0)) {
      const auto index =
          static_cast<std::size_t>(random.below(static_cast<std::int64_t>(held.size())));
      std::swap(held[index], held.back());
      Numbered last = std::move(held.back());
      held.pop_back();
      if (last.tensor.num_elements() < 5000) expect_whole(last);
      const Context& reader = contexts[random.below(2)];
      Numbered copied{Tensor::copy_of(reader, last.tensor), last.number};
      last.tensor = {};  // while the copy is under way
      if (random.below(4) == 0) expect_whole(copied);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

class CudaMemoryTest : public CudaTest {};

TEST_F(CudaMemoryTest, TenThousandRandomAllocationsAllComeBack) {
  context_.reset();
  allocate_at_random(1, 500);  // what CUDA itself allocates once is there after this
  const double before = free_mib();
  allocate_at_random(2, 10000);
  const double after = free_mib();
  std::printf("free before and after: %.1f MiB and %.1f MiB\n", before, after);
  EXPECT_GE(after, before - 2);
}

TEST_F(CudaMemoryTest, TensorsOutliveTheirContext) {
  Tensor kept;
  {
    const Context short_lived = cuda_context();
    kept = Tensor(short_lived, DType::kF32, {1000});
    fill_uniform(short_lived, kept, 3, 3, 0);
  }
  EXPECT_EQ(elements_of(kept), std::vector<double>(1000, 3));
  EXPECT_EQ(elements_of(kept.clone()), std::vector<double>(1000, 3));
  EXPECT_EQ(elements_of(kept.to(context())), std::vector<double>(1000, 3));
  context_.reset();
  EXPECT_EQ(elements_of(kept), std::vector<double>(1000, 3));  // with no Context at all
  EXPECT_EQ(elements_of(kept.clone()), std::vector<double>(1000, 3));
}

TEST_F(CudaMemoryTest, MemoryIsAligned) {
  for (const std::int64_t size : {1, 3, 100, 100000}) {
    const Tensor tensor(context(), DType::kI8, {size});
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(tensor.data()) % 64, 0U);
  }
}

TEST_F(CudaMemoryTest, EmptyTensorsHaveNoMemory) {
  const Tensor tensor(context(), DType::kF32, {0, 5});
  EXPECT_EQ(tensor.data(), nullptr);
  EXPECT_EQ(tensor.device(), context().device());
  EXPECT_EQ(tensor.to_host().num_elements(), 0);
}

// Promise 7. The pool keeps what it took from the system until its last Context goes, so the free
// memory tells the most that a call needed.
TEST_F(CudaMemoryTest, P7_ExtraMemoryIsLinear) {
  constexpr std::int64_t kLength = 32768;  // whose matrix of f32 scores would be 4096 MiB a head
  const auto make = [&](std::uint64_t seed) {
    return normal(DType::kBF16, {1, kLength, 2, 64}, seed);
  };
  const Tensor q = make(1);
  const Tensor k = make(2);
  const Tensor v = make(3);
  const Tensor dout = make(4);
  Tensor out = make(5);
  Tensor dq = make(6);
  Tensor dk = make(7);
  Tensor dv = make(8);
  Tensor lse(context(), DType::kF32, {1, 2, kLength});
  context().synchronize();
  const double before = free_mib();
  attention(context(), q, k, v, {.causal = true}, out, lse);
  attention_backward(context(), q, k, v, {.causal = true}, {.out = out, .lse = lse, .dout = dout},
                     {.dq = dq, .dk = dk, .dv = dv});
  context().synchronize();
  const double extra = before - free_mib();
  std::printf("extra memory of forward and backward over 8 MiB tensors: %.1f MiB\n", extra);
  EXPECT_LE(extra, 256);
}

}  // namespace
}  // namespace ladon::test
