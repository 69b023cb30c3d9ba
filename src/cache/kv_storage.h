// The memory of a cache: slots of keys and values, and their scales where the format has them.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/kv_params.h"
#include "ladon/kv_cache.h"
#include "ladon/tensor.h"

namespace ladon {

/// Most tokens of a sequence: far above any memory, and small enough that sums of a few do not
/// overflow.
inline constexpr std::int64_t kMostTokens = std::int64_t{1} << 40;

struct KvStorage {
  // [slots, num_kv_heads, dim]; v is empty (rank 0) where the values are in the keys.
  Tensor k{}, v{};
  Tensor k_scales{}, v_scales{};  // [slots, num_kv_heads], for scaled formats alone

  /// blocks * block_size slots, content unspecified. Throws Error (kOutOfMemory).
  static KvStorage make(const Context& context, const KvCacheOptions& options, std::int64_t blocks,
                        std::int64_t block_size);

  std::int64_t slots() const noexcept { return k.rank() == 0 ? 0 : k.size(0); }
  std::int64_t bytes() const noexcept;
  /// Points a view at this memory; says nothing of sequences, pages and rings.
  void set(KvCacheView& view) const noexcept;

  /// Slots as they are, from a storage with the same options on the same device.
  void copy_slots(const Context& context, const KvStorage& from, std::int64_t from_slot,
                  std::int64_t to_slot, std::int64_t count) noexcept;
};

/// The slots of a view, as backends write and gather them.
KvRowsParams kv_rows_params(const KvCacheView& view) noexcept;

/// What one token takes, in this cache and in multi-head attention; bytes include scales.
std::int64_t elements_per_token(const KvCacheOptions& options) noexcept;
std::int64_t bytes_per_token(const KvCacheOptions& options) noexcept;
std::int64_t mha_bytes_per_token(const KvCacheOptions& options) noexcept;

/// Throws Error for sizes or a format that no cache can have; fills in the defaults.
KvCacheOptions checked_options(std::string_view operation, KvCacheOptions options);

}  // namespace ladon
