// Decoding on GPUs: how a sequence's segments of keys are shared out depends on the batch, its bits
// do not. In large batches one warp computes several segments, alone a sequence has a block of
// threads for each.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
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

/// A call of one new token for each sequence, or a few.
struct Decoding {
  DType dtype = DType::kBF16;
  std::int64_t head_dim = 64;
  std::int64_t value_dim = 64;
  std::int64_t kv_heads = kHeads;
  std::int64_t group = 4;
  std::int64_t query_len = 1;
  std::int64_t page_size = 0;    // 0: contiguous
  std::int64_t window_left = 0;  // 0: none
  bool in_ring = false;          // where there is a window
  bool has_rules = false;        // softcap, ALiBi and sinks
  std::vector<std::int64_t> lengths{};

  std::int64_t batch() const { return static_cast<std::int64_t>(lengths.size()); }
};

/// Of sequences [begin, end) of the tensors.
Tensor decode(const Context& context, const Decoding& call, const Tensor& q, const Tensor& k,
              const Tensor& v, std::int64_t begin, std::int64_t end) {
  const KvCacheOptions holds{.batch = end - begin,
                             .num_kv_heads = call.kv_heads,
                             .head_dim = call.head_dim,
                             .value_dim = call.value_dim,
                             .format = call.dtype};
  const auto make_pool = [&] {
    return std::make_shared<PagePool>(context, holds, call.page_size,
                                      (end - begin) * (k.size(1) / call.page_size + 1));
  };
  const auto make_cache = [&] {
    if (call.in_ring) return KvCache::window(context, holds, call.window_left, call.query_len);
    return call.page_size == 0 ? KvCache::contiguous(context, holds, k.size(1))
                               : KvCache::paged(make_pool(), end - begin);
  };
  KvCache cache = make_cache();
  cache.append(
      context, k.view().slice(0, begin, end), v.view().slice(0, begin, end),
      std::span(call.lengths)
          .subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin)));
  AttentionOptions options{.causal = true};
  if (call.window_left != 0) options.window_left = call.window_left;
  Tensor slopes(context, DType::kF32, {call.kv_heads * call.group});
  Tensor sinks(context, DType::kF32, {call.kv_heads * call.group});
  if (call.has_rules) {
    fill_normal(context, slopes, .1, .05, 4);
    fill_normal(context, sinks, 0, 1, 5);
    options.softcap = 20;
    options.alibi_slopes = slopes;
    options.sinks = sinks;
  }
  Tensor out(context, call.dtype,
             {end - begin, call.query_len, call.kv_heads * call.group, call.value_dim});
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

/// Which operand has NaN or infinity.
enum class Odd { kNone, kKeys, kValues };

class CudaHopperDecode : public HopperKernelsTest {
 protected:
  /// Of a call with tensors of this seed.
  void expect_same_bits(const Decoding& call, std::uint64_t seed, Odd odd) {
    const std::int64_t batch = call.batch();
    const std::int64_t longest = *std::max_element(call.lengths.begin(), call.lengths.end());
    Tensor k = normal(call.dtype, {batch, longest, call.kv_heads, call.head_dim}, seed, 2);
    Tensor v = normal(call.dtype, {batch, longest, call.kv_heads, call.value_dim}, seed + 1);
    const Tensor q =
        normal(call.dtype, {batch, call.query_len, call.kv_heads * call.group, call.head_dim},
               seed + 2, 2);
    if (odd == Odd::kKeys) k = with_odd_elements(k, seed);
    if (odd == Odd::kValues) v = with_odd_elements(v, seed);
    context().synchronize();
    const Tensor fast = decode(*hopper_, call, q, k, v, 0, batch);
    const Tensor expected = decode(*generic_, call, q, k, v, 0, batch);
    EXPECT_TRUE(same_bits(fast, expected))
        << seed << ": " << name_of(call.dtype) << " D" << call.head_dim << "/" << call.value_dim
        << ", group " << call.group << ", " << call.query_len << " queries, pages of "
        << call.page_size << ", window " << call.window_left << (call.in_ring ? " in a ring" : "")
        << (call.has_rules ? ", rules" : "") << ", " << batch << " sequences, up to " << longest;
  }

 private:
  Tensor with_odd_elements(const Tensor& tensor, std::uint64_t seed) const {
    Random random(9, seed);
    const bool is_bf16 = tensor.dtype() == DType::kBF16;
    const std::uint16_t odd[] = {std::uint16_t(is_bf16 ? 0x7fc0 : 0x7e00),
                                 std::uint16_t(is_bf16 ? 0x7f80 : 0x7c00)};
    Tensor host = tensor.to_host();
    auto* const elements = static_cast<std::uint16_t*>(host.data());
    elements[random.below(host.num_elements())] = odd[random.below(2)];
    // The last tokens are those of a short segment.
    if (random.below(2) == 0) elements[host.num_elements() - 1] = odd[random.below(2)];
    return host.to(context());
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
    expect_same_bits(call, 10 + 3 * static_cast<std::uint64_t>(i),
                     i % 4 == 0 ? Odd::kValues : Odd::kNone);
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
      expect_same_bits(call, seed, i % 3 == 0 ? Odd::kValues : Odd::kNone);
    }
  }
}

struct HeadDims {
  std::int64_t head;
  std::int64_t value;
};
constexpr HeadDims kLongHeads[] = {{256, 256}, {256, 256}, {256, 128}, {192, 128}, {136, 8},
                                   {64, 256},  {200, 232}, {8, 136},   {250, 256}, {256, 130}};

/// A random call of heads with 129 to 256 columns over up to so many keys.
Decoding long_heads(Random& random, std::int64_t longest) {
  const HeadDims dims = kLongHeads[random.below(std::size(kLongHeads))];
  Decoding call{.dtype = random.below(2) == 0 ? DType::kBF16 : DType::kF16,
                .head_dim = dims.head,
                .value_dim = dims.value,
                .kv_heads = 1 + random.below(3),
                .group = kGroups[random.below(5)],
                .page_size = random.below(2) * (1 + random.below(80)),
                .window_left = random.below(3) == 0 ? 1 + random.below(longest) : 0};
  call.query_len = 1 + random.below(16 / call.group);
  call.has_rules = random.below(4) == 0;
  call.in_ring = call.window_left != 0 && call.page_size == 0 && random.below(2) == 0;
  const std::int64_t batch = 1 + random.below(3);
  for (std::int64_t b = 0; b < batch; ++b) call.lengths.push_back(1 + random.below(longest));
  call.lengths[0] = longest;
  return call;
}

Odd odd_operand(int i) { return i % 4 == 0 ? Odd::kValues : i % 8 == 2 ? Odd::kKeys : Odd::kNone; }

TEST_F(CudaHopperDecode, LongHeadsHaveTheBitsOfTheGenericKernels) {
  for (int i = 0; i < repetitions(160); ++i) {
    const std::uint64_t seed = 2000 + 3 * static_cast<std::uint64_t>(i);
    Random random(9, seed);
    const std::int64_t most = i % 2 == 0 ? 2048 : 9000;  // one segment, or several
    expect_same_bits(long_heads(random, 1 + random.below(most)), seed, odd_operand(i));
  }
}

/// Lengths on either side of blocks, of rounds of eight and of segments.
TEST_F(CudaHopperDecode, LongHeadsAtTheEndsOfBlocksAndSegments) {
  std::uint64_t seed = 3000;
  int i = 0;
  for (const std::int64_t end : {64, 128, 512, 576, 1024, 1984, 2048, 2560, 4096, 6144}) {
    for (const std::int64_t length : {end - 1, end, end + 1}) {
      Random random(9, seed);
      expect_same_bits(long_heads(random, length), seed, odd_operand(i++));
      seed += 3;
    }
  }
}

/// More tiles than multiprocessors, of any lengths.
TEST_F(CudaHopperDecode, ManyLongHeads) {
  for (int i = 0; i < 4; ++i) {
    const std::uint64_t seed = 4000 + 3 * static_cast<std::uint64_t>(i);
    Random random(9, seed);
    Decoding call{.dtype = i % 2 == 0 ? DType::kBF16 : DType::kF16,
                  .head_dim = 256,
                  .value_dim = 256,
                  .group = 2,
                  .page_size = i < 2 ? 16 : 0};
    for (int b = 0; b < 40; ++b) call.lengths.push_back(1 + random.below(i == 1 ? 2048 : 2600));
    call.lengths[3] = i == 1 ? 2048 : 2600;
    call.lengths[5] = 0;
    expect_same_bits(call, seed, i == 3 ? Odd::kValues : Odd::kNone);
  }
}

}  // namespace
}  // namespace ladon::test
