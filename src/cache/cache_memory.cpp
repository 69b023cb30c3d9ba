#include "ladon/cache_memory.h"

#include <string>
#include <utility>

#include "cache/kv_storage.h"
#include "core/fail.h"

namespace ladon {
namespace {

constexpr std::string_view kOperation = "compare_cache_memory";

void check_size(std::string_view name, std::int64_t value, std::int64_t least) {
  constexpr std::int64_t kMost = std::int64_t{1} << 48;
  if (value < least || value > kMost) {
    fail(kOperation, name,
         "got " + std::to_string(value) + ", expected " + std::to_string(least) + " to " +
             std::to_string(kMost));
  }
}

std::int64_t product(std::int64_t a, std::int64_t b) {
  std::int64_t result = 0;
  if (__builtin_mul_overflow(a, b, &result)) {
    fail(kOperation, "length", "got sizes whose product is too large, expected one below 2^63");
  }
  return result;
}

}  // namespace

std::vector<CacheMemory> compare_cache_memory(const CacheMemoryOptions& options) {
  check_size("length", options.length, 0);
  check_size("batch", options.batch, 0);
  check_size("num_layers", options.num_layers, 0);
  check_size("num_heads", options.num_heads, 1);
  check_size("num_kv_heads", options.num_kv_heads, 0);
  check_size("kv_rank", options.kv_rank, 0);
  check_size("rope_dim", options.rope_dim, 0);
  const std::int64_t tokens = product(product(options.length, options.batch), options.num_layers);
  std::vector<CacheMemory> rows;
  const auto add = [&](std::string_view kind, KvCacheOptions token) {
    token.num_heads = token.num_kv_heads;
    token.format = options.format;
    token = checked_options(kOperation, token);
    CacheMemory row{.kind = kind,
                    .elements = product(tokens, elements_per_token(token)),
                    .bytes = product(tokens, bytes_per_token(token))};
    const std::int64_t mha = rows.empty() ? row.elements : rows.front().elements;
    row.reduction = mha == 0 ? 0 : 1 - static_cast<double>(row.elements) / static_cast<double>(mha);
    rows.push_back(row);
  };
  const auto with_heads = [&](std::int64_t heads) {
    return KvCacheOptions{
        .num_kv_heads = heads, .head_dim = options.head_dim, .value_dim = options.value_dim};
  };
  add("MHA", with_heads(options.num_heads));
  if (options.num_kv_heads != 0) {
    if (options.num_heads % options.num_kv_heads != 0) {
      fail(kOperation, "num_kv_heads",
           "got " + std::to_string(options.num_kv_heads) +
               ", expected a divisor of num_heads = " + std::to_string(options.num_heads));
    }
    add("GQA", with_heads(options.num_kv_heads));
  }
  add("MQA", with_heads(1));
  if (options.kv_rank != 0) {
    add("MLA", {.num_kv_heads = 1,
                .head_dim = options.kv_rank + options.rope_dim,
                .value_dim = options.kv_rank,
                .values_in_keys = true});
  }
  return rows;
}

}  // namespace ladon
