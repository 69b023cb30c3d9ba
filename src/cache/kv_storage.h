// The memory of a cache: slots of keys and values, and their scales where they are i8.
#pragma once

#include <cstdint>
#include <string_view>

#include "ladon/kv_cache.h"
#include "ladon/tensor.h"

namespace ladon {

/// Most tokens of a sequence: far above any memory, and small enough that sums of a few do not
/// overflow.
inline constexpr std::int64_t kMostTokens = std::int64_t{1} << 40;

struct KvStorage {
  // [slots, num_kv_heads, dim]; v is empty (rank 0) where the values are in the keys.
  Tensor k{}, v{};
  Tensor k_scales{}, v_scales{};  // [slots, num_kv_heads], for i8 alone

  /// blocks * block_size slots, content unspecified. Throws Error (kOutOfMemory).
  static KvStorage make(const KvCacheOptions& options, std::int64_t blocks,
                        std::int64_t block_size);

  std::int64_t slots() const noexcept { return k.rank() == 0 ? 0 : k.size(0); }
  std::int64_t bytes() const noexcept;
  /// Points a view at this memory; says nothing of sequences, pages and rings.
  void set(KvCacheView& view) const noexcept;

  /// Slots as they are, from a storage with the same options.
  void copy_slots(const KvStorage& from, std::int64_t from_slot, std::int64_t to_slot,
                  std::int64_t count) noexcept;
  /// Tokens in [count, num_kv_heads, dim], converted, to slots that follow each other; v_rows are
  /// absent where the values are in the keys. Throws Error where they are this storage's own
  /// memory.
  void write_slots(const ConstTensorView& k_rows, const ConstTensorView& v_rows,
                   std::int64_t to_slot);
};

/// What one token takes, in this cache and in multi-head attention; bytes include scales.
std::int64_t elements_per_token(const KvCacheOptions& options) noexcept;
std::int64_t bytes_per_token(const KvCacheOptions& options) noexcept;
std::int64_t mha_bytes_per_token(const KvCacheOptions& options) noexcept;

/// Throws Error for sizes or a dtype that no cache can have; fills in the defaults.
KvCacheOptions checked_options(std::string_view operation, KvCacheOptions options);

}  // namespace ladon
