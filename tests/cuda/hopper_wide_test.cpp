// The backward pass of heads above 192 on Hopper: two kernels, which give the bits of the generic
// ones for every length, window, group and dtype of the gradients, each alone, and every time.
#include <gtest/gtest.h>

#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "cuda/hopper_kernels.h"
#include "ladon/attention.h"
#include "support/run_case.h"

namespace ladon::test {
namespace {

class CudaHopperWide : public HopperKernelsTest {};

struct HeadDims {
  std::int64_t head;
  std::int64_t value;
};
/// All beyond the kernel for heads up to 192 with values up to 128.
constexpr HeadDims kDims[] = {{256, 256}, {200, 200}, {256, 128}, {72, 256}, {256, 72},
                              {193, 40},  {160, 160}, {64, 136},  {248, 255}};

Case random_wide_case(Random& random) {
  const auto pick = [&](std::int64_t low, std::int64_t high) {
    return low + random.below(high - low + 1);
  };
  constexpr std::int64_t kGroups[] = {1, 2, 3, 4};
  const HeadDims dims = kDims[pick(0, std::size(kDims) - 1)];
  Case c;
  c.batch = pick(1, 3);
  c.query_len = pick(64, 520);
  c.kv_len = pick(1, 3) == 1 ? c.query_len : pick(64, 900);
  c.num_kv_heads = pick(1, 2);
  c.num_heads = c.num_kv_heads * kGroups[pick(0, 3)];
  c.head_dim = dims.head;
  c.value_dim = dims.value;
  c.dtype = c.kv_dtype = DType::kBF16;
  c.causal = pick(0, 2) != 0;
  c.alignment = pick(0, 1) == 0 ? Alignment::kBottomRight : Alignment::kTopLeft;
  if (pick(0, 2) == 0) c.window_left = pick(0, 400);
  if (!c.causal && pick(0, 2) == 0) c.window_right = pick(0, 300);
  if (pick(0, 4) == 0) {
    c.position_offset = pick(0, 700) - 350;
    c.alignment = Alignment::kBottomRight;  // an offset is given in place of a corner
  }
  c.lengths = static_cast<Lengths>(pick(0, 2));
  c.sinks = pick(0, 3) == 0;
  c.dlse = pick(0, 3) == 0;
  c.memory = pick(0, 2) == 0 ? Memory::kHeadsFirst : Memory::kDense;
  c.seed = static_cast<std::uint64_t>(pick(1, 1 << 20));
  return c;
}

TEST_F(CudaHopperWide, SameBitsAsTheGenericKernels) {
  for (int i = 0; i < repetitions(250); ++i) {
    Random random(11, static_cast<std::uint64_t>(i));
    const CaseData data(random_wide_case(random));
    ASSERT_TRUE(same_bits(run(*hopper_, data), run(*generic_, data)))
        << i << ": " << data.problem().describe();
  }
}

/// q, k, v and dout, and what the forward pass gives.
struct WideCase {
  WideCase(const Context& context, std::int64_t length, std::int64_t heads, std::int64_t kv_heads,
           const HeadDims& dims, const AttentionOptions& given)
      : options(given),
        q(context, DType::kBF16, {2, length, heads, dims.head}),
        k(context, DType::kBF16, {2, length, kv_heads, dims.head}),
        v(context, DType::kBF16, {2, length, kv_heads, dims.value}),
        dout(context, DType::kBF16, {2, length, heads, dims.value}),
        out(context, DType::kBF16, dout.shape()),
        lse(context, DType::kF32, {2, heads, length}) {
    std::uint64_t seed = 0;
    for (Tensor* tensor : {&q, &k, &v, &dout}) fill_normal(context, *tensor, 0, 1, ++seed);
    attention(context, q, k, v, options, out, lse);
    context.synchronize();
  }

  AttentionSaved saved() const { return {.out = out, .lse = lse, .dout = dout}; }

  AttentionOptions options;
  Tensor q, k, v, dout, out, lse;
};

/// The gradients in a dtype, computed in one call.
std::vector<Tensor> gradients_of(const Context& context, const WideCase& problem,
                                 DType dtype = DType::kBF16) {
  std::vector<Tensor> gradients;
  for (const Tensor* like : {&problem.q, &problem.k, &problem.v}) {
    gradients.emplace_back(context, dtype, like->shape());
  }
  attention_backward(context, problem.q, problem.k, problem.v, problem.options, problem.saved(),
                     {.dq = gradients[0], .dk = gradients[1], .dv = gradients[2]});
  context.synchronize();
  return gradients;
}

TEST_F(CudaHopperWide, EachGradientAlone) {
  for (const HeadDims& dims : {HeadDims{256, 256}, HeadDims{200, 72}}) {
    const WideCase problem(*hopper_, 333, 4, 2, dims, {.causal = true});
    const std::vector<Tensor> together = gradients_of(*hopper_, problem);
    for (int which = 0; which < 3; ++which) {
      const Tensor& expected = together[static_cast<std::size_t>(which)];
      Tensor alone(*hopper_, DType::kBF16, expected.shape());
      AttentionGradients wanted;
      (which == 0 ? wanted.dq : which == 1 ? wanted.dk : wanted.dv) = alone;
      attention_backward(*hopper_, problem.q, problem.k, problem.v, problem.options,
                         problem.saved(), wanted);
      hopper_->synchronize();
      EXPECT_TRUE(same_bits(alone, expected)) << which << " of heads of " << dims.head;
    }
  }
}

TEST_F(CudaHopperWide, GradientsInF32) {
  const WideCase problem(*hopper_, 333, 4, 2, {256, 256}, {.causal = true});
  const std::vector<Tensor> fast = gradients_of(*hopper_, problem, DType::kF32);
  const std::vector<Tensor> expected = gradients_of(*generic_, problem, DType::kF32);
  for (std::size_t i = 0; i < fast.size(); ++i) {
    EXPECT_TRUE(same_bits(fast[i], expected[i])) << i;
  }
}

TEST_F(CudaHopperWide, SameBitsEveryTime) {
  const WideCase problem(*hopper_, 1500, 12, 4, {256, 256}, {.causal = true});
  const std::vector<Tensor> first = gradients_of(*hopper_, problem);
  for (int i = 0; i < repetitions(200); ++i) {
    const std::vector<Tensor> again = gradients_of(*hopper_, problem);
    for (std::size_t j = 0; j < first.size(); ++j) ASSERT_TRUE(same_bits(again[j], first[j])) << i;
  }
}

/// In windows, where tiles that some rows of a block do not see hold NaN.
TEST_F(CudaHopperWide, NanReachesTheRowsThatSeeIt) {
  constexpr std::int64_t kLength = 700;
  for (const AttentionOptions& options :
       {AttentionOptions{}, AttentionOptions{.causal = true, .window_left = 100},
        AttentionOptions{.window_left = 63, .window_right = 64}}) {
    for (const std::int64_t token :
         {std::int64_t{0}, std::int64_t{64}, std::int64_t{383}, std::int64_t{450}, kLength - 1}) {
      WideCase problem(*hopper_, kLength, 2, 1, {256, 200}, options);
      for (Tensor* changed : {&problem.q, &problem.k, &problem.v, &problem.dout}) {
        const Tensor before = changed->to(context());
        *changed = with_token(context(), before, token, std::numeric_limits<float>::quiet_NaN());
        const std::vector<Tensor> fast = gradients_of(*hopper_, problem);
        const std::vector<Tensor> expected = gradients_of(*generic_, problem);
        for (std::size_t i = 0; i < fast.size(); ++i) {
          EXPECT_TRUE(same_bits(fast[i], expected[i])) << "token " << token << ", gradient " << i;
        }
        *changed = before.to(context());
        context().synchronize();
      }
    }
  }
}

}  // namespace
}  // namespace ladon::test
