// What int8 storage costs: its error against f32 storage, printed, within the bound of
// docs/numerics.md.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "cache/cache_support.h"
#include "support/contexts.h"

namespace ladon::test {
namespace {

class CacheInt8 : public ContextTest {};
class CacheInt8Storage : public ContextTest {};

constexpr std::int64_t kTokens = 700;
constexpr std::int64_t kHeads = 8;
constexpr std::int64_t kKvHeads = 2;
constexpr std::int64_t kDim = 64;

/// Of a tensor on the host.
double largest_in_row(const Tensor& tensor, std::int64_t row, std::int64_t dim) {
  double largest = 0;
  for (std::int64_t i = 0; i < dim; ++i) {
    largest = std::max(largest, std::fabs(number_at(tensor, row * dim + i)));
  }
  return largest;
}

/// One number of each row of a tensor on the host, in a fixed column, is `factor` times as large:
/// what keys of real models look like.
void add_outliers(Tensor& tensor, double factor) {
  const std::int64_t dim = tensor.size(3);
  for (std::int64_t row = 0; row < tensor.num_elements() / dim; ++row) {
    const double value = number_at(tensor, row * dim + 5);
    store_element(tensor.data(), tensor.dtype(), row * dim + 5, value * factor);
  }
}

TEST_P(CacheInt8Storage, EveryNumberIsWithinHalfAStep) {
  for (const double factor : {1.0, 50.0}) {
    Tensor k = random_tensor(DType::kF32, {1, 50, 2, 33}, 1);
    Tensor v = random_tensor(DType::kF32, {1, 50, 2, 20}, 2);
    add_outliers(k, factor);
    KvCache cache = KvCache::contiguous(
        context_, {.num_kv_heads = 2, .head_dim = 33, .value_dim = 20, .format = DType::kI8});
    cache.append(context_, there(k), there(v));
    const std::vector<double> content = content_of(context_, cache, 0);
    std::size_t next = 0;
    for (std::int64_t row = 0; row < 100; ++row) {
      for (const auto& [tensor, dim] : {std::pair{&k, 33}, std::pair{&v, 20}}) {
        const double half_step = largest_in_row(*tensor, row, dim) / 254;
        for (std::int64_t i = 0; i < dim; ++i) {
          ASSERT_LE(std::fabs(content[next++] - number_at(*tensor, row * dim + i)),
                    half_step * (1 + 1e-5));
        }
      }
    }
  }
}

/// Rows of a 16-bit dtype whose largest numbers have the given mantissas, and in which every number
/// of its power of two and of the lower ones down to half a step follows, as far as it is smaller.
Tensor every_smaller_number(DType dtype, const std::vector<int>& largest_mantissas) {
  const int mantissa_bits = dtype == DType::kBF16 ? 7 : 10;
  const int exponent = dtype == DType::kBF16 ? 130 : 20;
  const int lowest = (exponent - 8) << mantissa_bits;
  const int dim = ((exponent + 1) << mantissa_bits) - lowest;
  Tensor rows(dtype, {1, static_cast<std::int64_t>(largest_mantissas.size()), 1, dim});
  auto* next = static_cast<std::uint16_t*>(rows.data());
  for (const int mantissa : largest_mantissas) {
    const int largest = exponent << mantissa_bits | mantissa;
    for (int i = 0; i < dim; ++i) {
      const int sign = i % 3 == 0 ? 0x8000 : 0;
      *next++ = static_cast<std::uint16_t>(std::min(lowest + i, largest) | sign);
    }
  }
  return rows;
}

TEST_P(CacheInt8Storage, EverySixteenBitNumberGoesToTheNearestStep) {
  std::vector<int> all(128);
  std::iota(all.begin(), all.end(), 0);
  // Multiples of 127 have scales that are not rounded, thus many numbers in the middle of two
  // steps.
  std::vector<int> some = {0, 1, 2, 341, 682, 1023};
  for (int multiple = 1024 / 127 + 1; multiple * 127 < 2048; ++multiple) {
    some.push_back(multiple * 127 - 1024);
  }
  for (const auto& [dtype, mantissas] :
       {std::pair{DType::kBF16, &all}, std::pair{DType::kF16, &some}}) {
    const Tensor k = every_smaller_number(dtype, *mantissas);
    const std::int64_t dim = k.size(3);
    KvCache cache =
        KvCache::contiguous(context_, {.num_kv_heads = 1, .head_dim = dim, .format = DType::kI8});
    cache.append(context_, there(k), there(k));
    const HostView host = host_view(context_, cache.view());
    for (std::int64_t token = 0; token < k.size(1); ++token) {
      const std::int64_t slot = slot_in(host.view, host.view.sequences[0], token);
      const auto* stored =
          static_cast<const signed char*>(host.view.k) + slot * host.view.k_slot_stride;
      const auto scale = static_cast<float>(largest_in_row(k, token, dim) / 127);
      ASSERT_EQ(host.view.k_scales[slot * host.view.scale_slot_stride], scale);
      for (std::int64_t i = 0; i < dim; ++i) {
        const double number = number_at(k, token * dim + i);
        ASSERT_EQ(stored[i], std::nearbyint(number / static_cast<double>(scale)))
            << number << " at a scale of " << scale;
      }
    }
  }
}

TEST_P(CacheInt8Storage, LargeAppendsHaveTheBitsOfSmallOnes) {
  if (context_.isa() == Isa::kReference) return;  // one loop for both
  constexpr std::int64_t kMany = 6600;            // times 2 * 32 * 40: too many for a CPU's caches
  static const Tensor rows = random_tensor(DType::kBF16, {1, kMany, 32, 40}, 1);
  const Tensor k = there(rows);
  for (const DType storage : {DType::kBF16, DType::kI8}) {
    const KvCacheOptions options{.num_kv_heads = 32, .head_dim = 40, .format = storage};
    KvCache large = KvCache::contiguous(context_, options);
    large.append(context_, k, k);
    KvCache small = KvCache::contiguous(context_, options);
    for (std::int64_t begin = 0; begin < kMany; begin += kMany / 4) {
      const ConstTensorView part = k.view().slice(1, begin, begin + kMany / 4);
      small.append(context_, part, part);
    }
    const HostView left = host_view(context_, large.view());
    const HostView right = host_view(context_, small.view());
    const auto bytes_from = [&](const HostView& host, const void* data) {
      const std::int64_t first = slot_in(host.view, host.view.sequences[0], 0);
      return static_cast<const char*>(data) +
             first * host.view.k_slot_stride * static_cast<std::int64_t>(size_of(storage));
    };
    const auto bytes = static_cast<std::size_t>(kMany * 32 * 40) * size_of(storage);
    ASSERT_EQ(left.view.k_slot_stride, 32 * 40);
    EXPECT_EQ(std::memcmp(bytes_from(left, left.view.k), bytes_from(right, right.view.k), bytes),
              0);
    EXPECT_EQ(std::memcmp(bytes_from(left, left.view.v), bytes_from(right, right.view.v), bytes),
              0);
  }
}

TEST_P(CacheInt8Storage, WhatIsNotFiniteIsNotLost) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (const double bad : {std::nan(""), infinity, -infinity, 1e300}) {
    Tensor k = random_tensor(DType::kF64, {1, 2, 1, 4}, 1);
    store_element(k.data(), DType::kF64, 2, bad);
    KvCache cache =
        KvCache::contiguous(context_, {.num_kv_heads = 1, .head_dim = 4, .format = DType::kI8});
    cache.append(context_, there(k), there(k));
    const std::vector<double> content = content_of(context_, cache, 0);
    for (std::size_t i = 0; i < 8; ++i) EXPECT_TRUE(std::isnan(content[i]));
    for (std::size_t i = 8; i < 16; ++i) EXPECT_TRUE(std::isfinite(content[i]));
  }
  // Nothing but zeros stays that.
  KvCache cache =
      KvCache::contiguous(context_, {.num_kv_heads = 1, .head_dim = 4, .format = DType::kI8});
  const Tensor zeros(context_, DType::kF32, {1, 1, 1, 4});
  cache.append(context_, zeros, zeros);
  for (const double number : content_of(context_, cache, 0)) EXPECT_EQ(number, 0);
}

TEST_P(CacheInt8, ErrorAgainstF32StorageStaysWithinItsBound) {
  for (const double factor : {1.0, 20.0}) {
    Tensor k = random_tensor(DType::kF32, {1, kTokens, kKvHeads, kDim}, 1);
    Tensor v = random_tensor(DType::kF32, {1, kTokens, kKvHeads, kDim}, 2);
    add_outliers(k, factor);
    add_outliers(v, factor);
    const Tensor q = random_tensor(DType::kF32, {1, 1, kHeads, kDim}, 3);
    Tensor outs[2];
    for (const DType storage : {DType::kF32, DType::kI8}) {
      KvCache cache = KvCache::contiguous(
          context_, {.num_kv_heads = kKvHeads, .head_dim = kDim, .format = storage});
      cache.append(context_, there(k), there(v));
      Tensor out(context_, DType::kF32, {1, 1, kHeads, kDim});
      attention(context_, there(q), cache.view(), {}, out);
      outs[storage == DType::kI8 ? 1 : 0] = out.to_host();
    }
    // docs/numerics.md: |out - out'| <= half a step of v + (exp(2 * score_step) - 1) * sum(p *
    // |v|), where score_step is the most that a score can move.
    Tensor weights_there(context_, DType::kF64, {1, kHeads, 1, kTokens});
    attention_weights(context_, there(q), there(k), {}, weights_there);
    const Tensor weights = weights_there.to_host();
    const double scale = 1 / std::sqrt(static_cast<double>(kDim));
    double worst_share = 0;
    double worst_error = 0;
    double largest_out = 0;
    for (std::int64_t head = 0; head < kHeads; ++head) {
      const std::int64_t kv_head = head / (kHeads / kKvHeads);
      double q_sum = 0;
      for (std::int64_t i = 0; i < kDim; ++i) q_sum += std::fabs(number_at(q, head * kDim + i));
      double score_step = 0;
      double value_step = 0;
      for (std::int64_t t = 0; t < kTokens; ++t) {
        const std::int64_t row = t * kKvHeads + kv_head;
        score_step = std::max(score_step, scale * q_sum * largest_in_row(k, row, kDim) / 254);
        value_step = std::max(value_step, largest_in_row(v, row, kDim) / 254);
      }
      for (std::int64_t i = 0; i < kDim; ++i) {
        double weighted = 0;
        for (std::int64_t t = 0; t < kTokens; ++t) {
          weighted += number_at(weights, head * kTokens + t) *
                      std::fabs(number_at(v, (t * kKvHeads + kv_head) * kDim + i));
        }
        const double bound = value_step + std::expm1(2 * score_step) * weighted;
        const double truth = number_at(outs[0], head * kDim + i);
        const double error = std::fabs(number_at(outs[1], head * kDim + i) - truth);
        worst_share = std::max(worst_share, error / bound);
        worst_error = std::max(worst_error, error);
        largest_out = std::max(largest_out, std::fabs(truth));
      }
    }
    EXPECT_LE(worst_share, 1);
    std::printf(
        "int8 storage, %s: largest error %.2e of outputs up to %.2e (%.2f %%), %.3f of "
        "the bound\n",
        factor == 1 ? "normal data" : "outliers of 20 times", worst_error, largest_out,
        100 * worst_error / largest_out, worst_share);
    // A bug in the scales would be far above what rounding gives here.
    EXPECT_LE(worst_error, (factor == 1 ? 0.02 : 0.2) * largest_out);
  }
}

LADON_FOR_EACH_CONTEXT(CacheInt8);
LADON_FOR_EACH_CONTEXT(CacheInt8Storage);

}  // namespace
}  // namespace ladon::test
