// What the tests of cache files share, and files put together by hand, from the format that
// src/cache/cache_file.h describes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cache/cache_support.h"
#include "io/checksum.h"
#include "ladon/kv_cache.h"
#include "support/host_context.h"

namespace ladon::test {

template <class Number>
void add_number(std::string& bytes, Number number) {
  bytes.append(reinterpret_cast<const char*>(&number), sizeof number);
}

/// A file of a cache; what a test wants wrong, it changes.
struct CacheFile {
  std::string magic = "LADONKVC";
  std::uint32_t version = 1;
  std::uint32_t dtype = 2;                         // f32
  std::vector<std::int64_t> sizes = {1, 1, 1, 1};  // batch, num_kv_heads, head_dim, value_dim
  std::vector<std::pair<std::int64_t, std::int64_t>> sequences = {{0, 0}};  // first, length
  std::string tokens{};

  std::string bytes() const {
    std::string result = magic;
    add_number(result, version);
    add_number(result, dtype);
    for (const std::int64_t size : sizes) add_number(result, size);
    for (const auto& [first, length] : sequences) {
      add_number(result, first);
      add_number(result, length);
    }
    return with_checksum(result + tokens);
  }

  static std::string with_checksum(std::string bytes) {
    io::Crc64 sum;
    sum.add(bytes.data(), bytes.size());
    add_number(bytes, sum.value());
    return bytes;
  }
};

/// The same bytes with a last word that fits them.
inline std::string with_right_checksum(std::string_view bytes) {
  if (bytes.size() < 8) return std::string(bytes);
  return CacheFile::with_checksum(std::string(bytes.substr(0, bytes.size() - 8)));
}

inline KvCacheOptions options_of(DType dtype, std::int64_t batch = 2) {
  return {.batch = batch, .num_kv_heads = 2, .head_dim = 3, .value_dim = 2, .format = dtype};
}

inline KvCache paged(const Context& context, const KvCacheOptions& options, std::int64_t page_size,
                     std::int64_t pages = 100) {
  return KvCache::paged(std::make_shared<PagePool>(context, options, page_size, pages),
                        options.batch);
}

/// So many random tokens to each sequence.
inline void append_random(const Context& context, KvCache& cache,
                          const std::vector<std::int64_t>& counts, std::uint64_t stream) {
  const KvCacheOptions& options = cache.options();
  const std::int64_t most = *std::max_element(counts.begin(), counts.end());
  const Dims k_shape = {options.batch, most, options.num_kv_heads, options.head_dim};
  const Dims v_shape = {options.batch, most, options.num_kv_heads, options.value_dim};
  cache.append(context, random_tensor(context, DType::kF32, k_shape, stream),
               random_tensor(context, DType::kF32, v_shape, stream + 100), counts);
}
inline void append_random(KvCache& cache, const std::vector<std::int64_t>& counts,
                          std::uint64_t stream) {
  append_random(host_context(), cache, counts, stream);
}

}  // namespace ladon::test
