// KvCacheView: keys and values as a cache stores them, and attention() over it.
//
// Plain data, as attention's kernels read it. The caches of kv_cache.h and paged_kv_cache.h give
// such views; an engine with its own pages can fill one in.
#pragma once

#include <cstdint>
#include <span>

#include "ladon/attention.h"
#include "ladon/context.h"
#include "ladon/device.h"
#include "ladon/export.h"
#include "ladon/kv_format.h"
#include "ladon/tensor_view.h"

namespace ladon {

/// Where the keys of one sequence are stored: key j is in slot
///   pages[j / page_size] * page_size + j % page_size   of a paged cache
///   first_slot + (ring_start + j) % ring_slots         of a ring
///   first_slot + j                                     otherwise
struct KvSequenceView {
  std::int64_t length = 0;  // keys that can be read
  std::int64_t first_slot = 0;
  std::int64_t ring_start = 0;
  /// Tokens before the first key: 0 unless older ones were dropped. Kernels whose bits must not
  /// depend on what was dropped count blocks of keys from there.
  std::int64_t key_origin = 0;
  const std::int32_t* pages = nullptr;  // host memory
};

/// Slots of num_kv_heads keys and values each. Strides are in elements; the elements of one head
/// are contiguous.
struct KvCacheView {
  /// f64 (for f64 queries alone), f32, f16, bf16, or int8 or fp8 (f8e4m3) with scales. fp8 elements
  /// are numbers: what the codes of NaN, 0x7f and 0xff, read as is not defined.
  KvFormat format{};
  DeviceId device{};  // of k, v and the scales
  std::int64_t num_kv_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t value_dim = 0;
  std::int64_t num_slots = 0;
  const void* k = nullptr;
  const void* v = nullptr;
  std::int64_t k_slot_stride = 0;
  std::int64_t k_head_stride = 0;
  std::int64_t v_slot_stride = 0;
  std::int64_t v_head_stride = 0;
  std::int64_t page_size = 0;   // 0: not paged
  std::int64_t ring_slots = 0;  // 0: not a ring
  /// int8 and fp8 elements are dequantised with one f32 scale per (slot, head), [num_slots,
  /// num_kv_heads] with these strides, aligned as floats are. Null for other formats.
  const float* k_scales = nullptr;
  const float* v_scales = nullptr;
  std::int64_t scale_slot_stride = 0;
  std::int64_t scale_head_stride = 0;
  std::span<const KvSequenceView> sequences{};
};

/// attention() of q [batch, query_len, num_heads, head_dim] over a cache: the queries of sequence b
/// are the newest tokens of the cache's sequence b. With query_offsets, q is packed: [1, total,
/// num_heads, head_dim]. The cache has its own lengths, so kv_lengths and kv_offsets must be left
/// out, and the alignment at kBottomRight. Keys count from the oldest that is held; mask and bias
/// have a key dimension as long as the longest sequence (or 1). The cache's format may be any
/// that is listed above. Where neighbours in the batch decode over the same pages, these are read
/// from memory once for up to 16 of them.
LADON_API void attention(const Context& context, const ConstTensorView& q, const KvCacheView& cache,
                         const AttentionOptions& options, const TensorView& out,
                         const TensorView& lse = {});

}  // namespace ladon
