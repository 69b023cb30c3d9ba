// The file of a cache. All numbers are little-endian.
//
//   8 bytes   "LADONKVC"
//   u32       version, 1
//   u32       dtype: 1 f64, 2 f32, 3 f16, 4 bf16, 5 i8, 6 f8e4m3; 256 more where the values are in
//   the keys i64 x 4   batch, num_kv_heads, head_dim, value_dim i64 x 2   for each sequence: the
//   first token that is held, and its length bytes     for each sequence, its tokens from the first
//   on, as they are stored: all keys, all
//             values (where they are not in the keys), and for i8 and f8e4m3 all scales of the keys
//             (f32), all scales of the values
//   u64       CRC-64 of everything before
#pragma once

#include <filesystem>
#include <memory>

#include "cache/kv_cache_impl.h"

namespace ladon {

void save_cache(const Context& context, const KvCache::Impl& cache,
                const std::filesystem::path& path);

/// A cache of `like`'s kind and options with the file's content.
std::unique_ptr<KvCache::Impl> load_cache(const Context& context, const KvCache::Impl& like,
                                          const std::filesystem::path& path);

}  // namespace ladon
