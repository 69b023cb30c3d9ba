// Decoding on GPUs: how a sequence's segments of keys are shared out depends on the batch, its bits
// do not. In large batches one warp computes several segments, alone a sequence has a block of
// threads for each.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cuda/hopper_kernels.h"
#include "ladon/attention.h"
#include "ladon/kv_cache.h"
#include "ladon/kv_cache_view.h"
#include "ladon/paged_kv_cache.h"

namespace ladon::test {
namespace {

constexpr std::int64_t kHeads = 8;  // of keys and values

/// A call of one new token for each sequence.
struct Decoding {
  DType dtype = DType::kBF16;
  std::int64_t head_dim = 64;
  std::int64_t value_dim = 64;
  std::int64_t group = 4;
  std::int64_t page_size = 0;    // 0: contiguous
  std::int64_t window_left = 0;  // 0: none
  std::vector<std::int64_t> lengths{};

  std::int64_t batch() const { return static_cast<std::int64_t>(lengths.size()); }
};

/// Of sequences [begin, end) of the tensors.
Tensor decode(const Context& context, const Decoding& call, const Tensor& q, const Tensor& k,
              const Tensor& v, std::int64_t begin, std::int64_t end) {
  const KvCacheOptions holds{.batch = end - begin,
                             .num_kv_heads = kHeads,
                             .head_dim = call.head_dim,
                             .value_dim = call.value_dim,
                             .format = call.dtype};
  const auto make_pool = [&] {
    return std::make_shared<PagePool>(context, holds, call.page_size,
                                      (end - begin) * (k.size(1) / call.page_size + 1));
  };
  KvCache cache = call.page_size == 0 ? KvCache::contiguous(context, holds, k.size(1))
                                      : KvCache::paged(make_pool(), end - begin);
  cache.append(
      context, k.view().slice(0, begin, end), v.view().slice(0, begin, end),
      std::span(call.lengths)
          .subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin)));
  AttentionOptions options{.causal = true};
  if (call.window_left != 0) options.window_left = call.window_left;
  Tensor out(context, call.dtype, {end - begin, 1, kHeads * call.group, call.value_dim});
  attention(context, q.view().slice(0, begin, end), cache.view(), options, out);
  return out;
}

class CudaDecode : public CudaTest {};

TEST_F(CudaDecode, P6_AloneAndInALargeBatch) {
  constexpr std::int64_t kBatch = 80;
  constexpr std::int64_t kLongest = 3100;
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    const Tensor k = normal(dtype, {kBatch, kLongest, kHeads, 64}, 1, 2);
    const Tensor v = normal(dtype, {kBatch, kLongest, kHeads, 64}, 2);
    const Tensor q = normal(dtype, {kBatch, 1, kHeads * 8, 64}, 3, 2);
    for (const std::int64_t page_size : {0, 24}) {
      for (const std::int64_t window_left : {0, 700}) {
        Decoding call{
            .dtype = dtype, .group = 8, .page_size = page_size, .window_left = window_left};
        for (std::int64_t b = 0; b < kBatch; ++b) call.lengths.push_back(kLongest - b * 37);
        call.lengths[7] = 1;
        const Tensor all = decode(context(), call, q, k, v, 0, kBatch);
        for (const std::int64_t b : {0, 7, 8, 41, 79}) {
          const Tensor alone = decode(context(), call, q, k, v, b, b + 1);
          EXPECT_TRUE(same_bits(alone, Tensor::copy_of(context(), all.view().slice(0, b, b + 1))))
              << name_of(dtype) << ", sequence " << b << ", pages of " << page_size << ", window "
              << window_left;
        }
      }
    }
  }
}

class CudaHopperDecode : public HopperKernelsTest {
 protected:
  /// Of a call with tensors of this seed; where has_odd, with NaN or infinity among the values.
  void expect_same_bits(const Decoding& call, std::uint64_t seed, bool has_odd) {
    Random random(9, seed);
    const std::int64_t batch = call.batch();
    const std::int64_t longest = *std::max_element(call.lengths.begin(), call.lengths.end());
    const Tensor k = normal(call.dtype, {batch, longest, kHeads, call.head_dim}, seed, 2);
    Tensor v = normal(call.dtype, {batch, longest, kHeads, call.value_dim}, seed + 1);
    const Tensor q =
        normal(call.dtype, {batch, 1, kHeads * call.group, call.head_dim}, seed + 2, 2);
    if (has_odd) {
      const bool is_bf16 = call.dtype == DType::kBF16;
      const std::uint16_t odd[] = {std::uint16_t(is_bf16 ? 0x7fc0 : 0x7e00),
                                   std::uint16_t(is_bf16 ? 0x7f80 : 0x7c00)};
      Tensor host = v.to_host();
      auto* const values = static_cast<std::uint16_t*>(host.data());
      values[random.below(host.num_elements())] = odd[random.below(2)];
      // The last tokens are those of a short segment.
      if (random.below(2) == 0) values[host.num_elements() - 1] = odd[random.below(2)];
      v = host.to(context());
    }
    context().synchronize();
    const Tensor fast = decode(*hopper_, call, q, k, v, 0, batch);
    const Tensor expected = decode(*generic_, call, q, k, v, 0, batch);
    EXPECT_TRUE(same_bits(fast, expected))
        << seed << ": D" << call.head_dim << "/" << call.value_dim << ", group " << call.group
        << ", pages of " << call.page_size << ", window " << call.window_left << ", " << batch
        << " sequences, up to " << longest;
  }
};

constexpr std::int64_t kDims[] = {128, 64, 8, 40, 120, 72};
constexpr std::int64_t kGroups[] = {1, 2, 4, 8, 16};

TEST_F(CudaHopperDecode, SameBitsAsTheGenericKernels) {
  for (int i = 0; i < repetitions(120); ++i) {
    Random random(9, static_cast<std::uint64_t>(i));
    Decoding call{.dtype = random.below(2) == 0 ? DType::kBF16 : DType::kF16,
                  .head_dim = kDims[random.below(6)],
                  .value_dim = kDims[random.below(6)],
                  .group = kGroups[random.below(5)],
                  .page_size = random.below(2) * (1 + random.below(40)),
                  .window_left = random.below(2) * (1 + random.below(1500))};
    const std::int64_t longest = 513 + random.below(3000);
    const std::int64_t batch = 1 + random.below(3);
    for (std::int64_t b = 0; b < batch; ++b) call.lengths.push_back(1 + random.below(longest));
    call.lengths[0] = longest;
    expect_same_bits(call, 10 + 3 * static_cast<std::uint64_t>(i), i % 4 == 0);
  }
}

/// More segments than an H200 has multiprocessors, the last of which are short, of one sequence and
/// of three: two of them share a multiprocessor up to 256 keys.
TEST_F(CudaHopperDecode, ShortLastSegmentsHaveTheSameBits) {
  const std::vector<std::int64_t> all_lengths[] = {
      {8193},          {8300},          {8448},           {8449},          {8704},
      {2561, 2561, 1}, {2816, 100, 61}, {2700, 2563, 64}, {1, 2049, 2570}, {2817, 2561, 2600}};
  std::uint64_t seed = 1000;
  for (const std::vector<std::int64_t>& lengths : all_lengths) {
    for (int i = 0; i < 8; ++i, seed += 3) {
      Random random(9, seed);
      Decoding call{.dtype = i % 2 == 0 ? DType::kBF16 : DType::kF16,
                    .head_dim = i < 4 ? 128 : kDims[random.below(6)],
                    .value_dim = i < 4 ? 128 : kDims[random.below(6)],
                    .group = kGroups[random.below(5)],
                    .page_size = random.below(2) * (1 + random.below(40)),
                    .window_left = i % 4 == 3 ? 1 + random.below(1500) : 0,
                    .lengths = lengths};
      expect_same_bits(call, seed, i % 3 == 0);
    }
  }
}

}  // namespace
}  // namespace ladon::test
