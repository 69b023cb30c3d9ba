// Quantised storage, int8 and fp8: which bytes and scales are stored, what every code reads as, and
// the error against f32 storage, printed, within the bound of docs/numerics.md.

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
#include "cache/quantised_support.h"
#include "support/contexts.h"

namespace ladon::test {
namespace {

class CacheQuantised : public ContextTest {};
class CacheQuantisedStorage : public ContextTest {};

constexpr std::int64_t kTokens = 700;
constexpr std::int64_t kHeads = 8;
constexpr std::int64_t kKvHeads = 2;
constexpr std::int64_t kDim = 64;

TEST_P(CacheQuantisedStorage, EveryNumberIsWithinHalfAStep) {
  for (const DType storage : kQuantised) {
    for (const double factor : {1.0, 50.0, 1e6}) {
      Tensor k = random_tensor(DType::kF32, {1, 50, 2, 33}, 1);
      Tensor v = random_tensor(DType::kF32, {1, 50, 2, 20}, 2);
      add_outliers(k, factor);
      KvCache cache = KvCache::contiguous(
          context_, {.num_kv_heads = 2, .head_dim = 33, .value_dim = 20, .format = storage});
      cache.append(context_, there(k), there(v));
      const std::vector<double> content = content_of(context_, cache, 0);
      std::size_t next = 0;
      for (std::int64_t row = 0; row < 100; ++row) {
        for (const auto& [tensor, dim] : {std::pair{&k, 33}, std::pair{&v, 20}}) {
          const double largest = largest_in_row(*tensor, row, dim);
          for (std::int64_t i = 0; i < dim; ++i) {
            const double number = number_at(*tensor, row * dim + i);
            ASSERT_LE(std::fabs(content[next++] - number),
                      most_off(storage, number, largest) * (1 + 1e-5))
                << name_of(storage);
          }
        }
      }
    }
  }
}

/// Rows of a 16-bit dtype whose largest numbers have the given mantissas, and in which every number
/// of its power of two and of the lower ones down to half a step follows, as far as it is smaller.
Tensor every_smaller_number(DType dtype, DType storage, const std::vector<int>& largest_mantissas) {
  const int mantissa_bits = dtype == DType::kBF16 ? 7 : 10;
  const int exponent = dtype == DType::kBF16 ? 130 : 20;
  const int lowest = (exponent - (storage == DType::kI8 ? 8 : 19)) << mantissa_bits;
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

TEST_P(CacheQuantisedStorage, EverySixteenBitNumberGoesToTheNearestStep) {
  std::vector<int> all(128);
  std::iota(all.begin(), all.end(), 0);
  // Multiples of 127 have scales that are not rounded, thus many numbers in the middle of two
  // steps.
  std::vector<int> some = {0, 1, 2, 341, 682, 1023};
  for (int multiple = 1024 / 127 + 1; multiple * 127 < 2048; ++multiple) {
    some.push_back(multiple * 127 - 1024);
  }
  for (const DType storage : kQuantised) {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      const Tensor k = every_smaller_number(dtype, storage, dtype == DType::kBF16 ? all : some);
      const std::int64_t dim = k.size(3);
      KvCache cache =
          KvCache::contiguous(context_, {.num_kv_heads = 1, .head_dim = dim, .format = storage});
      cache.append(context_, there(k), there(k));
      const HostView host = host_view(context_, cache.view());
      for (std::int64_t token = 0; token < k.size(1); ++token) {
        const std::int64_t slot = slot_in(host.view, host.view.sequences[0], token);
        const auto* stored =
            static_cast<const unsigned char*>(host.view.k) + slot * host.view.k_slot_stride;
        const float scale = scale_of(storage, largest_in_row(k, token, dim));
        ASSERT_EQ(host.view.k_scales[slot * host.view.scale_slot_stride], scale);
        for (std::int64_t i = 0; i < dim; ++i) {
          const double number = number_at(k, token * dim + i);
          const double units = number / static_cast<double>(scale);
          const int code =
              storage == DType::kI8
                  ? static_cast<unsigned char>(static_cast<signed char>(std::nearbyint(units)))
                  : nearest_fp8(units);
          ASSERT_EQ(stored[i], code)
              << name_of(storage) << ": " << number << " at a scale of " << scale;
        }
      }
    }
  }
}

TEST_P(CacheQuantisedStorage, EdgesOfFp8) {
  constexpr std::int64_t kNumbers = 19;
  // Denormals, the middle between two numbers, what rounds up to a power of two, the largest; of
  // each row the first is the largest.
  const double rows[][kNumbers] = {
      {448, 0, -0.0, 0x1p-9, 0x1p-10, -0x1p-10, 0x1.8p-9, 0x1.7p-7, 0x1.fp-7, 0x1p-6, 17, 18, 19,
       21, -440, 432, 1, -1, 0x1.fffffep-10},
      {449, 464, -479, 3, 0x1p-8, 0x1p-9, 0x1.8p-8, -0x1.4p-8, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14,
       15},
      {0x1.fffffep127, 0x1p120, -0x1p110, 0x1p100, 1, 0x1p-126, 0x1.8p111, 0, 0, 0, 0, 0, 0, 0, 0,
       0, 0, 0, 0},
      {0x1p-117, 0x1p-126, 0x1p-130, -0x1p-135, 0x1p-136, 0x1p-149, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
       0, 0},
      {0, -0.0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}};
  constexpr std::int64_t kRows = std::size(rows);
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    Tensor k(dtype, {1, kRows, 1, kNumbers});
    for (std::int64_t i = 0; i < kRows * kNumbers; ++i) {
      store_element(k.data(), dtype, i, rows[i / kNumbers][i % kNumbers]);
    }
    KvCache cache = KvCache::contiguous(
        context_, {.num_kv_heads = 1, .head_dim = kNumbers, .format = DType::kF8E4M3});
    cache.append(context_, there(k), there(k));
    const HostView host = host_view(context_, cache.view());
    for (std::int64_t row = 0; row < kRows; ++row) {
      const std::int64_t slot = slot_in(host.view, host.view.sequences[0], row);
      const float scale = scale_of(DType::kF8E4M3, largest_in_row(k, row, kNumbers));
      ASSERT_EQ(host.view.k_scales[slot * host.view.scale_slot_stride], scale);
      for (std::int64_t i = 0; i < kNumbers; ++i) {
        const auto* stored =
            static_cast<const unsigned char*>(host.view.k) + slot * host.view.k_slot_stride;
        const double number = number_at(k, row * kNumbers + i);
        const int code = scale == 0 ? 0 : nearest_fp8(number / static_cast<double>(scale));
        EXPECT_EQ(stored[i], code) << name_of(dtype) << " " << number << " in row " << row;
      }
    }
  }
}

/// One visible key: an output is its value, and the lse of a query with a single 1 an element of
/// the key. Of few queries and of many, which run different kernels.
TEST_P(CacheQuantisedStorage, EveryCodeIsReadAsItsNumber) {
  constexpr std::int64_t kCodes = 127;  // the codes up to 448, and the same with a sign
  for (const DType storage : kQuantised) {
    Tensor codes(storage, {1, 2, kCodes});
    Tensor scales(DType::kF32, {1, 2});
    for (std::int64_t i = 0; i < 2 * kCodes; ++i) {
      static_cast<unsigned char*>(codes.data())[i] =
          static_cast<unsigned char>(i < kCodes ? i : 0x80 + i - kCodes);
    }
    for (int i = 0; i < 2; ++i) store_element(scales.data(), DType::kF32, i, 1);
    const Tensor k = there(codes);
    const Tensor of_slots = there(scales);
    const KvSequenceView sequence{.length = 1};
    const KvCacheView view{.format = storage,
                           .device = k.device(),
                           .num_kv_heads = 2,
                           .head_dim = kCodes,
                           .value_dim = kCodes,
                           .num_slots = 1,
                           .k = k.data(),
                           .v = k.data(),
                           .k_slot_stride = 2 * kCodes,
                           .k_head_stride = kCodes,
                           .v_slot_stride = 2 * kCodes,
                           .v_head_stride = kCodes,
                           .k_scales = static_cast<const float*>(of_slots.data()),
                           .v_scales = static_cast<const float*>(of_slots.data()),
                           .scale_slot_stride = 2,
                           .scale_head_stride = 1,
                           .sequences = std::span(&sequence, 1)};
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
      for (const std::int64_t step : {std::int64_t{1}, std::int64_t{6}, kCodes}) {
        for (std::int64_t begin = 0; begin < kCodes; begin += step) {
          const std::int64_t count = std::min(step, kCodes - begin);
          Tensor q(dtype, {1, count, 2, kCodes});
          for (std::int64_t i = 0; i < count; ++i) {
            for (std::int64_t head = 0; head < 2; ++head) {
              store_element(q.data(), dtype, (i * 2 + head) * kCodes + begin + i, 1);
            }
          }
          Tensor out(context_, dtype, {1, count, 2, kCodes});
          Tensor lse(context_, dtype == DType::kF64 ? DType::kF64 : DType::kF32, {1, 2, count});
          attention(context_, there(q), view, {.scale = 1}, out, lse);
          const Tensor got = out.to_host();
          const Tensor logs = lse.to_host();
          for (std::int64_t i = 0; i < count * 2 * kCodes; ++i) {
            const int code = static_cast<const unsigned char*>(codes.data())[i % (2 * kCodes)];
            const double expected = storage == DType::kI8
                                        ? static_cast<double>(static_cast<signed char>(code))
                                        : fp8_number(code);
            ASSERT_EQ(number_at(got, i), expected)
                << name_of(dtype) << " over " << name_of(storage) << ", code " << code;
          }
          for (std::int64_t i = 0; i < 2 * count; ++i) {
            const int code = static_cast<const unsigned char*>(
                codes.data())[i / count * kCodes + begin + i % count];
            const double expected = storage == DType::kI8
                                        ? static_cast<double>(static_cast<signed char>(code))
                                        : fp8_number(code);
            // Softmax in powers of two rounds the score once more.
            ASSERT_NEAR(number_at(logs, i), expected, 1e-6 * std::max(1.0, std::fabs(expected)))
                << name_of(dtype) << " over " << name_of(storage) << ", code " << code;
          }
        }
      }
    }
  }
}

TEST_P(CacheQuantisedStorage, LargeAppendsHaveTheBitsOfSmallOnes) {
  if (context_.isa() == Isa::kReference) return;  // one loop for both
  constexpr std::int64_t kMany = 6600;            // times 2 * 32 * 40: too many for a CPU's caches
  static const Tensor rows = random_tensor(DType::kBF16, {1, kMany, 32, 40}, 1);
  const Tensor k = there(rows);
  for (const DType storage : {DType::kBF16, DType::kI8, DType::kF8E4M3}) {
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

TEST_P(CacheQuantisedStorage, WhatIsNotFiniteIsNotLost) {
  for (const DType storage : kQuantised) {
    const double infinity = std::numeric_limits<double>::infinity();
    for (const double bad : {std::nan(""), infinity, -infinity, 1e300}) {
      Tensor k = random_tensor(DType::kF64, {1, 2, 1, 4}, 1);
      store_element(k.data(), DType::kF64, 2, bad);
      KvCache cache =
          KvCache::contiguous(context_, {.num_kv_heads = 1, .head_dim = 4, .format = storage});
      cache.append(context_, there(k), there(k));
      const std::vector<double> content = content_of(context_, cache, 0);
      for (std::size_t i = 0; i < 8; ++i) EXPECT_TRUE(std::isnan(content[i]));
      for (std::size_t i = 8; i < 16; ++i) EXPECT_TRUE(std::isfinite(content[i]));
    }
    // Nothing but zeros stays that.
    KvCache cache =
        KvCache::contiguous(context_, {.num_kv_heads = 1, .head_dim = 4, .format = storage});
    const Tensor zeros(context_, DType::kF32, {1, 1, 1, 4});
    cache.append(context_, zeros, zeros);
    for (const double number : content_of(context_, cache, 0)) EXPECT_EQ(number, 0);
  }
}

/// Decoding rounds 16-bit queries and their weights to integers; f32 queries are multiplied as
/// floats.
TEST_P(CacheQuantised, IntegerProductsAddLittleToTheError) {
  for (const double factor : {1.0, 20.0}) {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      Tensor k = random_tensor(DType::kF32, {1, kTokens, kKvHeads, kDim}, 1);
      add_outliers(k, factor);
      KvCache cache = KvCache::contiguous(
          context_, {.num_kv_heads = kKvHeads, .head_dim = kDim, .format = DType::kI8});
      cache.append(context_, there(k), there(k));
      const Tensor q = random_tensor(dtype, {1, 1, kHeads, kDim}, 3);
      Tensor same(DType::kF32, q.shape());
      for (std::int64_t i = 0; i < q.num_elements(); ++i) {
        store_element(same.data(), DType::kF32, i, number_at(q, i));
      }
      const auto attend = [&](const Tensor& queries) {
        Tensor out(context_, queries.dtype(), queries.shape());
        attention(context_, there(queries), cache.view(), {}, out);
        return out.to_host();
      };
      const Tensor integers = attend(q);
      const Tensor floats = attend(same);
      const double rounding = dtype == DType::kBF16 ? 0x1p-8 : 0x1p-11;
      double worst = 0;
      double largest_out = 0;
      for (std::int64_t i = 0; i < q.num_elements(); ++i) {
        const double expected = number_at(floats, i);
        const double error = std::fabs(number_at(integers, i) - expected);
        worst = std::max(worst, error - rounding * std::fabs(expected));
        largest_out = std::max(largest_out, std::fabs(expected));
      }
      std::printf("%s queries, outliers of %.0f times: at most %.4f %% of the largest output\n",
                  name_of(dtype), factor, 100 * worst / largest_out);
      EXPECT_LE(worst, 2e-4 * largest_out);
    }
  }
}

TEST_P(CacheQuantised, ErrorAgainstF32StorageStaysWithinItsBound) {
  for (const double factor : {1.0, 20.0}) {
    Tensor k = random_tensor(DType::kF32, {1, kTokens, kKvHeads, kDim}, 1);
    Tensor v = random_tensor(DType::kF32, {1, kTokens, kKvHeads, kDim}, 2);
    add_outliers(k, factor);
    add_outliers(v, factor);
    const Tensor q = random_tensor(DType::kF32, {1, 1, kHeads, kDim}, 3);
    Tensor outs[3];
    for (const auto& [storage, to] :
         {std::pair{DType::kF32, &outs[0]}, {DType::kI8, &outs[1]}, {DType::kF8E4M3, &outs[2]}}) {
      KvCache cache = KvCache::contiguous(
          context_, {.num_kv_heads = kKvHeads, .head_dim = kDim, .format = storage});
      cache.append(context_, there(k), there(v));
      Tensor out(context_, DType::kF32, {1, 1, kHeads, kDim});
      attention(context_, there(q), cache.view(), {}, out);
      *to = out.to_host();
    }
    // docs/numerics.md: |out - out'| <= the most that v is off + (exp(2 * score_step) - 1) * sum(p
    // * |v|), where score_step is the most that a score can move.
    Tensor weights_there(context_, DType::kF64, {1, kHeads, 1, kTokens});
    attention_weights(context_, there(q), there(k), {}, weights_there);
    const Tensor weights = weights_there.to_host();
    const double scale = 1 / std::sqrt(static_cast<double>(kDim));
    for (const auto& [storage, out_of_storage] :
         {std::pair{DType::kI8, &outs[1]}, {DType::kF8E4M3, &outs[2]}}) {
      const Tensor& out = *out_of_storage;
      const double allowed = storage == DType::kF8E4M3 ? 0.1 : factor == 1 ? 0.02 : 0.2;
      double worst_share = 0;
      double worst_error = 0;
      double largest_out = 0;
      for (std::int64_t head = 0; head < kHeads; ++head) {
        const std::int64_t kv_head = head / (kHeads / kKvHeads);
        double score_step = 0;
        for (std::int64_t t = 0; t < kTokens; ++t) {
          const std::int64_t row = t * kKvHeads + kv_head;
          const double largest = largest_in_row(k, row, kDim);
          double moved = 0;
          for (std::int64_t i = 0; i < kDim; ++i) {
            moved += std::fabs(number_at(q, head * kDim + i)) *
                     most_off(storage, number_at(k, row * kDim + i), largest);
          }
          score_step = std::max(score_step, scale * moved);
        }
        for (std::int64_t i = 0; i < kDim; ++i) {
          double weighted = 0;
          double value_step = 0;
          for (std::int64_t t = 0; t < kTokens; ++t) {
            const std::int64_t row = t * kKvHeads + kv_head;
            const double value = number_at(v, row * kDim + i);
            weighted += number_at(weights, head * kTokens + t) * std::fabs(value);
            value_step =
                std::max(value_step, most_off(storage, value, largest_in_row(v, row, kDim)));
          }
          const double bound = value_step + std::expm1(2 * score_step) * weighted;
          const double truth = number_at(outs[0], head * kDim + i);
          const double error = std::fabs(number_at(out, head * kDim + i) - truth);
          worst_share = std::max(worst_share, error / bound);
          worst_error = std::max(worst_error, error);
          largest_out = std::max(largest_out, std::fabs(truth));
        }
      }
      EXPECT_LE(worst_share, 1);
      std::printf(
          "%s storage, %s: largest error %.2e of outputs up to %.2e (%.2f %%), %.3f of "
          "the bound\n",
          name_of(storage), factor == 1 ? "normal data" : "outliers of 20 times", worst_error,
          largest_out, 100 * worst_error / largest_out, worst_share);
      // A bug in the scales would be far above what rounding gives here.
      EXPECT_LE(worst_error, allowed * largest_out);
    }
  }
}

LADON_FOR_EACH_CONTEXT(CacheQuantised);
LADON_FOR_EACH_CONTEXT(CacheQuantisedStorage);

}  // namespace
}  // namespace ladon::test
