// Keys and values read back from a cache of any kind.

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "cache/cache_support.h"
#include "support/error_of.h"

namespace ladon::test {
namespace {

class CacheRead : public ContextTest {};

std::vector<CacheKind> every_kind() {
  std::vector<CacheKind> kinds = unlimited_kinds();
  kinds.push_back({.name = "window", .window_left = 5});
  return kinds;
}

TEST_P(CacheRead, WhatWasAppended) {
  for (const CacheKind& kind : every_kind()) {
    for (const DType stored : kStorages) {
      KvCache cache = make_cache(
          context_, kind,
          {.batch = 2, .num_kv_heads = 2, .head_dim = 5, .value_dim = 3, .format = stored});
      const Tensor k = normal(DType::kF32, {2, 11, 2, 5}, 1);
      const Tensor v = normal(DType::kF32, {2, 11, 2, 3}, 2);
      const std::vector<std::int64_t> lengths = {11, 7};
      cache.append(context_, k, v, lengths);
      for (std::int64_t b = 0; b < 2; ++b) {
        const std::int64_t end = lengths[static_cast<std::size_t>(b)];
        const std::int64_t begin = end - cache.held(b);
        const Tensor keys = cache.keys(context_, b);
        const Tensor values = cache.values(context_, b);
        EXPECT_EQ(keys.shape(), (Dims{end - begin, 2, 5})) << kind.name;
        EXPECT_EQ(values.shape(), (Dims{end - begin, 2, 3})) << kind.name;
        EXPECT_EQ(keys.dtype(), needs_scale(stored) ? DType::kF32 : stored);
        EXPECT_EQ(cache.keys(context_, b, DType::kF64).dtype(), DType::kF64);
        const double step = stored == DType::kF32      ? 0
                            : stored == DType::kF8E4M3 ? 1.0 / 16
                            : stored == DType::kI8     ? 0.02
                                                       : 0.01;
        const auto expect_near = [&](const Tensor& read, const Tensor& appended) {
          const std::vector<double> got = elements_of(read);
          const std::vector<double> expected =
              elements_of(context_, appended.view().select(0, b).slice(0, begin, end));
          ASSERT_EQ(got.size(), expected.size());
          for (std::size_t i = 0; i < got.size(); ++i) {
            ASSERT_NEAR(got[i], expected[i], step * (1 + std::abs(expected[i]))) << kind.name;
          }
        };
        expect_near(keys, k);
        expect_near(values, v);
      }
    }
  }
}

TEST_P(CacheRead, ValuesWithinKeysAndEmptySequences) {
  KvCache cache = KvCache::contiguous(
      context_,
      {.batch = 2, .num_kv_heads = 1, .head_dim = 5, .value_dim = 3, .values_in_keys = true});
  const Tensor k = normal(DType::kF32, {2, 4, 1, 5}, 1);
  const std::vector<std::int64_t> lengths = {4, 0};
  cache.append(context_, k, {}, lengths);
  EXPECT_EQ(elements_of(cache.keys(context_)), elements_of(context_, k.view().select(0, 0)));
  EXPECT_EQ(elements_of(cache.values(context_)),
            elements_of(context_, k.view().select(0, 0).slice(2, 0, 3)));
  EXPECT_EQ(cache.keys(context_, 1).shape(), (Dims{0, 1, 5}));
  EXPECT_EQ(error_of([&] { cache.keys(context_, 0, DType::kI32); }),
            "KvCache::keys: dtype: got i32, expected f64, f32, f16 or bf16");
  EXPECT_NE(error_of([&] { cache.values(context_, 2); }).find("KvCache::values: sequence: got 2"),
            std::string::npos);
}

LADON_FOR_EACH_CONTEXT(CacheRead);

}  // namespace
}  // namespace ladon::test
