#include "models/family_runs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>

#include "ladon/latent_attention.h"
#include "ladon/multi_head_attention.h"
#include "ladon/paged_kv_cache.h"
#include "support/contexts.h"
#include "support/host_context.h"

namespace ladon::test {
namespace {

constexpr int kBatch = 2;
constexpr int kLength = 11;

/// In chunks of these sizes, again and again, over a cache.
Tensor in_chunks(const Context& context, const AttentionLayer& layer, const Tensor& x,
                 KvCache cache, const std::vector<std::int64_t>& sizes) {
  const Tensor there = x.to(context);
  Tensor out(context, x.dtype(), x.shape());
  std::int64_t done = 0;
  for (std::size_t round = 0; done < x.size(1); ++round) {
    const std::int64_t end = std::min(x.size(1), done + sizes[round % sizes.size()]);
    layer.forward(context, there.view().slice(1, done, end), cache, {},
                  out.view().slice(1, done, end));
    done = end;
  }
  return out.to_host();
}

}  // namespace

const Context& test_context() {
  static const Context kContext(ContextOptions{.num_threads = 1});
  return kContext;
}

const std::vector<Context>& test_contexts() {
  static const std::vector<Context> kContexts = [] {
    std::vector<Context> all;
    for (const Place& place : fastest_places()) all.push_back(place.context(1));
    return all;
  }();
  return kContexts;
}

std::vector<WayToRun> runs(const Context& context, const AttentionLayer& loaded) {
  std::vector<WayToRun> ways = {{"whole", [&context](const AttentionLayer& layer, const Tensor& x) {
                                   return layer.forward(context, x.to(context)).to_host();
                                 }}};
  std::optional<std::int64_t> window;
  if (const auto* const latent = dynamic_cast<const LatentAttention*>(&loaded)) {
    if (!latent->options().causal) return ways;
  } else {
    const auto& options = dynamic_cast<const MultiHeadAttention&>(loaded).options();
    if (!options.causal) return ways;
    window = options.window_left;
  }
  const auto contiguous = [&context](const std::vector<std::int64_t>& sizes) {
    return [&context, sizes](const AttentionLayer& layer, const Tensor& x) {
      return in_chunks(context, layer, x, KvCache::contiguous(context, layer.cache_options(kBatch)),
                       sizes);
    };
  };
  ways.push_back({"token by token", contiguous({1})});
  ways.push_back({"a prompt and tokens", contiguous({6, 1, 1, 1, 1, 1})});
  ways.push_back({"chunks", contiguous({3, 1, 4})});
  ways.push_back({"pages", [&context](const AttentionLayer& layer, const Tensor& x) {
                    const auto pool =
                        std::make_shared<PagePool>(context, layer.cache_options(), 4, 16);
                    return in_chunks(context, layer, x, KvCache::paged(pool, kBatch), {5, 1});
                  }});
  if (window) {
    ways.push_back({"a ring", [&context, left = *window](const auto& layer, const Tensor& x) {
                      return in_chunks(context, layer, x,
                                       KvCache::window(context, layer.cache_options(kBatch), left),
                                       {2, 1});
                    }});
  }
  return ways;
}

Tensor input_of(const FamilyCase& setup) {
  return TensorMaker(5).make({kBatch, kLength, setup.embed_dim}, 1);
}

std::vector<double> plain_output(const FamilyCase& setup, int layer, const Tensor& x) {
  const PlainRun plain = setup.plain(setup.tensors, layer);
  std::vector<double> out;
  const double* next = x.data_as<double>();
  for (int sequence = 0; sequence < kBatch; ++sequence) {
    Rows rows;
    for (int token = 0; token < kLength; ++token, next += setup.embed_dim) {
      rows.emplace_back(next, next + setup.embed_dim);
    }
    for (const auto& row : plain(rows)) out.insert(out.end(), row.begin(), row.end());
  }
  return out;
}

Difference difference(const Tensor& out, const std::vector<double>& expected) {
  const Tensor wide = Tensor::copy_of(host_context(), out, DType::kF64);
  Difference result;
  EXPECT_EQ(static_cast<std::size_t>(wide.num_elements()), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double off = std::abs(wide.data_as<double>()[i] - expected[i]);
    result.largest = std::isnan(off) ? off : std::max(result.largest, off);
    result.scale = std::max(result.scale, std::abs(expected[i]));
  }
  return result;
}

std::vector<std::string> case_names() {
  std::vector<std::string> names;
  for (const FamilyCase& setup : family_cases()) names.push_back(setup.name);
  return names;
}

std::vector<std::string> case_names(bool latent) {
  std::vector<std::string> names;
  for (const FamilyCase& setup : family_cases()) {
    if (setup.latent == latent) names.push_back(setup.name);
  }
  return names;
}

}  // namespace ladon::test
