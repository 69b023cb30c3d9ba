#include "cache_plan.h"

#include <algorithm>
#include <map>
#include <string>

#include "failure.h"
#include "ladon/cache_memory.h"
#include "ladon/error.h"

namespace ladon::cli {
namespace {

constexpr std::int64_t kUsualKvHeads = 8;
// Contexts and batches past this are not searched.
constexpr std::int64_t kMost = std::int64_t{1} << 50;

/// Bytes of `layers` layers that hold `length` tokens each.
std::int64_t bytes_of(const ModelShape& model, const CacheVariant& variant, std::int64_t layers,
                      std::int64_t length, const CacheRequest& request) {
  const auto rows = compare_cache_memory({.length = length,
                                          .batch = request.batch,
                                          .num_layers = layers,
                                          .format = request.dtype,
                                          .num_heads = model.num_heads,
                                          .head_dim = model.head_dim,
                                          .value_dim = model.value_dim,
                                          .num_kv_heads = variant.num_kv_heads,
                                          .kv_rank = variant.kv_rank,
                                          .rope_dim = variant.rope_dim});
  for (const CacheMemory& row : rows) {
    if (row.kind == variant.kind) return row.bytes;
  }
  throw Failure("plan: no " + std::string(variant.kind) + " row");
}

/// The largest number in [0, kMost] for which `fits` holds, where it holds for all smaller ones.
template <class Fits>
std::optional<std::int64_t> largest(const Fits& fits) {
  if (fits(kMost)) return {};
  std::int64_t good = 0;
  std::int64_t bad = kMost;
  while (bad - good > 1) {
    const std::int64_t middle = good + (bad - good) / 2;
    (fits(middle) ? good : bad) = middle;
  }
  return good;
}

bool fits_into(const ModelShape& model, const CacheVariant& variant, const CacheRequest& request,
               std::int64_t memory) {
  try {
    return cache_bytes(model, variant, request) <= memory;
  } catch (const Error&) {  // too many to count
    return false;
  }
}

}  // namespace

std::vector<CacheVariant> cache_variants(const ModelShape& model) {
  const std::string_view own = model.kind();
  std::vector<CacheVariant> variants;
  const auto add = [&](CacheVariant variant) {
    variant.own = variant.kind == own;
    variants.push_back(variant);
  };
  add({.kind = "MHA"});
  if (own == "GQA") {
    add({.kind = "GQA", .num_kv_heads = model.num_kv_heads});
  } else if (model.num_heads > kUsualKvHeads && model.num_heads % kUsualKvHeads == 0) {
    add({.kind = "GQA", .num_kv_heads = kUsualKvHeads});
  }
  add({.kind = "MQA"});
  if (own == "MLA") {
    add({.kind = "MLA", .kv_rank = model.kv_rank, .rope_dim = model.rope_dim});
  } else {
    add({.kind = "MLA", .kv_rank = 4 * model.head_dim, .rope_dim = model.head_dim / 2});
  }
  return variants;
}

std::int64_t cache_bytes(const ModelShape& model, const CacheVariant& variant,
                         const CacheRequest& request) {
  std::map<std::int64_t, std::int64_t> layers;  // by the tokens that they hold
  for (const std::int64_t window : model.windows) {
    const bool limited = variant.own && window != 0;
    ++layers[limited ? std::min(window, request.context) : request.context];
  }
  std::int64_t total = 0;
  for (const auto& [length, count] : layers) {
    const std::int64_t bytes = bytes_of(model, variant, count, length, request);
    if (__builtin_add_overflow(total, bytes, &total)) {
      throw Error(ErrorCode::kInvalidArgument, "plan: the bytes overflow 64 bits");
    }
  }
  return total;
}

std::optional<std::int64_t> most_context(const ModelShape& model, const CacheVariant& variant,
                                         CacheRequest request, std::int64_t memory) {
  return largest([&](std::int64_t context) {
    request.context = context;
    return fits_into(model, variant, request, memory);
  });
}

std::optional<std::int64_t> most_batch(const ModelShape& model, const CacheVariant& variant,
                                       CacheRequest request, std::int64_t memory) {
  return largest([&](std::int64_t batch) {
    request.batch = batch;
    return fits_into(model, variant, request, memory);
  });
}

}  // namespace ladon::cli
