// Hopper's latent kernel (MLA, absorbed: the values are the first columns of the keys) gives the
// bits of the generic kernels: for every length and layout, however many rows, and next to NaN.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cuda/hopper_kernels.h"
#include "ladon/kv_cache_view.h"
#include "support/run_case.h"

namespace ladon::test {
namespace {

struct LatentCase {
  std::vector<std::int64_t> lengths;
  std::int64_t query_len = 1;
  std::int64_t num_heads = 128;
  std::int64_t head_dim = 576;
  std::int64_t value_dim = 512;
  std::int64_t page_size = 0;
  DType dtype = DType::kBF16;
  bool causal = true;
  std::int64_t window_left = -1;
  bool sinks = false;
  double deviation = 1;

  std::string describe() const {
    std::string text = "lengths";
    for (const std::int64_t length : lengths) text += " " + std::to_string(length);
    return text + ", " + std::to_string(query_len) + " queries of " + std::to_string(num_heads) +
           " heads, " + std::to_string(head_dim) + "/" + std::to_string(value_dim) + ", pages of " +
           std::to_string(page_size) + ", " + std::string(name_of(dtype)) +
           (causal ? ", causal" : "") + ", window " + std::to_string(window_left);
  }
};

/// Latents in the slots of a cache, and NaN in all other slots.
class Latents {
 public:
  Latents(const Context& context, const LatentCase& problem, std::uint64_t seed) {
    const Context host;
    const std::int64_t page = problem.page_size == 0 ? 1 : problem.page_size;
    std::int64_t slots = page;
    for (const std::int64_t length : problem.lengths) slots += (length / page + 2) * page;
    Tensor all(problem.dtype, {slots, problem.head_dim});
    Tensor poison(DType::kF32, {slots, problem.head_dim});
    std::fill_n(poison.data_as<float>(), poison.num_elements(),
                std::numeric_limits<float>::quiet_NaN());
    copy(host, poison, all);
    std::int64_t next = slots / page;  // pages are used from the last to the first
    std::int64_t slot = 1;
    pages_.resize(problem.lengths.size());
    for (std::size_t s = 0; s < problem.lengths.size(); ++s) {
      const std::int64_t length = problem.lengths[s];
      Tensor tokens(problem.dtype, {length, problem.head_dim});
      fill_normal(host, tokens, 0, problem.deviation, seed + s);
      KvSequenceView sequence{.length = length};
      if (problem.page_size == 0) {
        sequence.first_slot = slot;
        copy(host, tokens, all.view().slice(0, slot, slot + length));
        slot += length + 1;
      }
      for (std::int64_t begin = 0; problem.page_size != 0 && begin < length; begin += page) {
        const std::int64_t end = std::min(length, begin + page);
        --next;
        pages_[s].push_back(static_cast<std::int32_t>(next));
        copy(host, tokens.view().slice(0, begin, end),
             all.view().slice(0, next * page, next * page + end - begin));
      }
      sequence.pages = pages_[s].data();
      if (problem.page_size == 0) sequence.pages = nullptr;
      sequences_.push_back(sequence);
    }
    slots_ = all.to(context);
    context.synchronize();
  }

  Tensor& slots() { return slots_; }
  KvCacheView view(const LatentCase& problem) const {
    KvCacheView view;
    view.format.dtype = problem.dtype;
    view.device = slots_.device();
    view.num_kv_heads = 1;
    view.head_dim = problem.head_dim;
    view.value_dim = problem.value_dim;
    view.num_slots = slots_.size(0);
    view.k = view.v = slots_.data();
    view.k_slot_stride = view.v_slot_stride = problem.head_dim;
    view.k_head_stride = view.v_head_stride = problem.head_dim;
    view.page_size = problem.page_size;
    view.sequences = sequences_;
    return view;
  }

 private:
  Tensor slots_;
  std::vector<std::vector<std::int32_t>> pages_;
  std::vector<KvSequenceView> sequences_;
};

class CudaLatent : public HopperKernelsTest {
 protected:
  struct Results {
    Tensor out;
    Tensor lse;
  };
  Results run(const Context& where, const LatentCase& problem, const Latents& latents,
              const Tensor& q, const Tensor& sinks) const {
    const std::int64_t batch = q.size(0);
    Results results{Tensor(where, problem.dtype,
                           {batch, problem.query_len, problem.num_heads, problem.value_dim}),
                    Tensor(where, DType::kF32, {batch, problem.num_heads, problem.query_len})};
    AttentionOptions options{.scale = 0.07, .causal = problem.causal};
    if (problem.window_left >= 0) options.window_left = problem.window_left;
    if (problem.sinks) options.sinks = sinks;
    attention(where, q, latents.view(problem), options, results.out, results.lse);
    where.synchronize();
    return results;
  }

  void expect_same_bits(const LatentCase& problem, std::uint64_t seed) const {
    const Latents latents(context(), problem, seed);
    expect_same_bits(problem, latents, seed);
  }
  void expect_same_bits(const LatentCase& problem, const Latents& latents,
                        std::uint64_t seed) const {
    const auto batch = static_cast<std::int64_t>(problem.lengths.size());
    const Tensor q = normal(problem.dtype,
                            {batch, problem.query_len, problem.num_heads, problem.head_dim}, seed);
    const Tensor sinks = normal(DType::kF32, {problem.num_heads}, seed + 1);
    context().synchronize();
    const Results fast = run(*hopper_, problem, latents, q, sinks);
    const Results expected = run(*generic_, problem, latents, q, sinks);
    EXPECT_TRUE(same_bits(fast.out, expected.out)) << problem.describe();
    EXPECT_TRUE(same_bits(fast.lse, expected.lse)) << "lse: " << problem.describe();
  }
};

TEST_F(CudaLatent, SameBitsAsTheGenericKernels) {
  for (int i = 0; i < repetitions(80); ++i) {
    Random random(11, static_cast<std::uint64_t>(i));
    const auto pick = [&](std::int64_t low, std::int64_t high) {
      return low + random.below(high - low + 1);
    };
    constexpr std::int64_t kHeads[] = {16, 128, 128, 12, 1, 96};
    constexpr std::int64_t kPages[] = {0, 0, 16, 64, 8, 32, 128, 7};
    constexpr std::int64_t kDims[][2] = {{576, 512}, {576, 512}, {576, 512}, {544, 512},
                                         {520, 512}, {512, 512}, {480, 448}};
    LatentCase problem;
    problem.query_len = pick(1, 3);
    for (std::int64_t s = pick(1, 3); s > 0; --s) {
      problem.lengths.push_back(pick(problem.query_len, 1300));
    }
    problem.num_heads = kHeads[pick(0, 5)];
    problem.page_size = kPages[pick(0, 7)];
    const auto& dims = kDims[pick(0, 6)];
    problem.head_dim = dims[0];
    problem.value_dim = dims[1];
    problem.dtype = pick(0, 2) == 0 ? DType::kF16 : DType::kBF16;
    problem.causal = pick(0, 3) != 0;
    if (pick(0, 3) == 0) problem.window_left = pick(0, 700);
    problem.sinks = pick(0, 3) == 0;
    problem.deviation = pick(0, 1) == 0 ? 1 : 8;
    expect_same_bits(problem, static_cast<std::uint64_t>(i) * 10);
    if (HasFailure()) return;
  }
}

/// Around the ends of blocks of 64 keys and segments of 512.
TEST_F(CudaLatent, EveryEndOfABlock) {
  for (const std::int64_t length : {1,   2,   63,  64,  65,  127, 128, 129,  191,  192,  193, 256,
                                    257, 511, 512, 513, 575, 576, 577, 1023, 1024, 1025, 1088}) {
    expect_same_bits({.lengths = {length, 700}, .page_size = length % 2 == 0 ? 16 : 0}, 3);
  }
}

TEST_F(CudaLatent, ManyTasks) {
  // Parts whose segments are kept apart, folded in the kernel, and both.
  expect_same_bits({.lengths = {20000}}, 1);
  expect_same_bits({.lengths = {9000, 30, 5000}, .num_heads = 16, .page_size = 64}, 2);
  expect_same_bits({.lengths = std::vector<std::int64_t>(33, 3000)}, 3);
  std::vector<std::int64_t> lengths;
  for (std::int64_t s = 0; s < 80; ++s) lengths.push_back(2 + s * 37 % 1700);
  expect_same_bits({.lengths = lengths, .page_size = 16}, 4);
  expect_same_bits({.lengths = lengths, .query_len = 2, .num_heads = 16}, 5);
  // A chunk of a prompt.
  expect_same_bits({.lengths = {1500, 700}, .query_len = 150}, 6);
  expect_same_bits({.lengths = {1500, 700}, .query_len = 150, .num_heads = 24, .window_left = 333},
                   7);
  expect_same_bits({.lengths = {20, 700}, .query_len = 20}, 8);
}

/// Rows that do not exist next to rows that do, in a warp, a warpgroup and a pair of tiles.
TEST_F(CudaLatent, PartlyFilledTiles) {
  for (const std::vector<std::int64_t>& lengths :
       {std::vector<std::int64_t>{700, 1300, 3, 513}, std::vector<std::int64_t>(150, 700)}) {
    for (const std::int64_t num_heads : {1, 12, 37, 100}) {
      for (const std::int64_t query_len : {1, 2, 3}) {
        expect_same_bits({.lengths = lengths, .query_len = query_len, .num_heads = num_heads}, 9);
      }
    }
  }
}

TEST_F(CudaLatent, InfinityAndNanReachTheRowsThatSeeThem) {
  for (const std::int64_t length : {700, 6000}) {
    for (const float value :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), 3e38F}) {
      for (const std::int64_t token : {std::int64_t{0}, std::int64_t{600}, length - 1}) {
        const LatentCase problem{.lengths = {length, 300}, .query_len = 3, .num_heads = 48};
        Latents latents(context(), problem, 5);
        const Context host;
        Tensor slots = latents.slots().to_host();
        Tensor spot(DType::kF32, {1, problem.head_dim});
        std::fill_n(spot.data_as<float>(), spot.num_elements(), value);
        copy(host, spot, slots.view().slice(0, 1 + token, 2 + token));
        copy(context(), slots.to(context()), latents.slots());
        context().synchronize();
        expect_same_bits(problem, latents, 6);
      }
    }
  }
}

/// Quantised latents, one scale per token, against the same elements in f32 on the CPU.
TEST_F(CudaLatent, Fp8Latents) {
  const Context host;
  for (const std::int64_t num_heads : {16, 128}) {
    const LatentCase problem{.lengths = {700, 130}, .num_heads = num_heads};
    const std::int64_t slots = 832;
    Tensor codes(DType::kF8E4M3, {slots, problem.head_dim});
    Tensor exact(DType::kF32, {slots, problem.head_dim});
    Tensor scales(DType::kF32, {slots, 1});
    fill_normal(host, exact, 0, 1, 1);
    copy(host, exact, codes);
    copy(host, codes, exact);
    float largest = 0;
    for (std::int64_t slot = 0; slot < slots; ++slot) {
      scales.data_as<float>()[slot] = 0.25F * static_cast<float>(1 + slot % 7);
      float* const row = exact.data_as<float>() + slot * problem.head_dim;
      for (std::int64_t i = 0; i < problem.head_dim; ++i) {
        row[i] *= scales.data_as<float>()[slot];
        largest = std::max(largest, std::abs(row[i]));
      }
    }
    const std::vector<KvSequenceView> sequences{{.length = 700, .first_slot = 1},
                                                {.length = 130, .first_slot = 702}};
    const auto view_of = [&](const Tensor& latents, const Tensor& factors) {
      KvCacheView view;
      view.format = KvFormat(latents.dtype());
      view.device = latents.device();
      view.num_kv_heads = 1;
      view.head_dim = problem.head_dim;
      view.value_dim = problem.value_dim;
      view.num_slots = slots;
      view.k = view.v = latents.data();
      view.k_slot_stride = view.v_slot_stride = problem.head_dim;
      view.k_head_stride = view.v_head_stride = problem.head_dim;
      if (view.format.scaled) {
        view.k_scales = view.v_scales = static_cast<const float*>(factors.data());
      }
      view.scale_slot_stride = view.scale_head_stride = 1;
      view.sequences = sequences;
      return view;
    };
    Tensor q(DType::kBF16, {2, 1, num_heads, problem.head_dim});
    fill_normal(host, q, 0, 0.3, 2);
    Tensor exact_q(DType::kF32, q.shape());
    copy(host, q, exact_q);
    Tensor expected(DType::kF32, {2, 1, num_heads, problem.value_dim});
    const AttentionOptions options{.scale = 0.07, .causal = true};
    attention(host, exact_q, view_of(exact, scales), options, expected);

    const Tensor there = codes.to(*hopper_);
    const Tensor scales_there = scales.to(*hopper_);
    Tensor out(*hopper_, DType::kBF16, expected.shape());
    attention(*hopper_, q.to(*hopper_), view_of(there, scales_there), options, out);
    Tensor got(DType::kF32, expected.shape());
    copy(host, out.to_host(), got);
    const float bound = largest / 128;
    float largest_expected = 0;
    for (std::int64_t i = 0; i < got.num_elements(); ++i) {
      ASSERT_NEAR(got.data_as<float>()[i], expected.data_as<float>()[i], bound) << "element " << i;
      largest_expected = std::max(largest_expected, std::abs(expected.data_as<float>()[i]));
    }
    EXPECT_GT(largest_expected, 5 * bound);
  }
}

TEST_F(CudaLatent, SameBitsEveryTime) {
  const LatentCase problem{.lengths = {4000, 2500, 900}, .page_size = 16};
  const Latents latents(context(), problem, 1);
  const Tensor q = normal(problem.dtype, {3, 1, 128, 576}, 2);
  context().synchronize();
  const Results first = run(*hopper_, problem, latents, q, {});
  for (int i = 0; i < repetitions(200); ++i) {
    ASSERT_TRUE(same_bits(run(*hopper_, problem, latents, q, {}).out, first.out)) << i;
  }
}

}  // namespace
}  // namespace ladon::test
