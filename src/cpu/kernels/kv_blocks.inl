// Keys and values of one head, in any layout in which tensors and caches store them.
#pragma once

#include <cstdint>

#include "cpu/kernels/convert.inl"

namespace ladon::cpu {
namespace {

/// The tokens of one head as rows, from `token` on. `offset` is the sequence's first element.
inline Matrix head_rows(const Operand& operand, std::int64_t offset, std::int64_t head,
                        std::int64_t token) {
  const std::int64_t first = offset + head * operand.head_stride + token * operand.token_stride;
  return {at(operand.data, operand.dtype, first), operand.dtype, operand.token_stride};
}

/// Keys [begin, end) of one KV head.
struct KeySpan {
  const AttentionParams& params;
  const Sequence& sequence;
  std::int64_t kv_head;
  std::int64_t begin;
  std::int64_t end;
  std::int64_t last_end = end;  // end of the task's keys: nothing beyond is prefetched

  std::int64_t count() const { return end - begin; }
};

enum class KvPart { kKeys, kValues };

template <KvPart kPart>
inline const Operand& kv_operand(const AttentionParams& params) {
  return kPart == KvPart::kKeys ? params.k : params.v;
}
template <KvPart kPart>
inline std::int64_t kv_dim(const AttentionParams& params) {
  return kPart == KvPart::kKeys ? params.head_dim : params.value_dim;
}

/// The slot that stores a key, by page table, in a ring or in order.
inline std::int64_t kv_slot(const KvLayout& layout, const Sequence& sequence, std::int64_t key) {
  if (layout.page_size != 0) {
    const std::int64_t page = sequence.pages[key / layout.page_size];
    return page * layout.page_size + key % layout.page_size;
  }
  if (layout.ring_slots != 0) {
    return sequence.first_slot + (sequence.ring_start + key) % layout.ring_slots;
  }
  return sequence.first_slot + key;
}

/// How many keys from `key` on are in consecutive slots, existing or not.
inline std::int64_t consecutive_slots(const KvLayout& layout, const Sequence& sequence,
                                      std::int64_t key) {
  if (layout.page_size != 0) return layout.page_size - key % layout.page_size;
  if (layout.ring_slots != 0) {
    return layout.ring_slots - (sequence.ring_start + key) % layout.ring_slots;
  }
  return kNoWindow;
}

/// Whether keys [begin, end) are in consecutive slots.
inline bool slots_contiguous(const KvLayout& layout, const Sequence& sequence, std::int64_t begin,
                             std::int64_t end) {
  if (layout.page_size != 0) return begin / layout.page_size == (end - 1) / layout.page_size;
  return kv_slot(layout, sequence, end - 1) - kv_slot(layout, sequence, begin) == end - 1 - begin;
}

/// The first element of one slot and head.
template <KvPart kPart>
inline std::int64_t kv_row(const AttentionParams& params, const Sequence& sequence,
                           std::int64_t head, std::int64_t slot) {
  const Operand& operand = kv_operand<kPart>(params);
  return (kPart == KvPart::kKeys ? sequence.k : sequence.v) + slot * operand.token_stride +
         head * operand.head_stride;
}

/// Converts n elements of a scaled cache to f32, without their scale.
template <DType kFrom>
inline void load_codes_as(const void* from, std::int64_t n, float* to) {
  if constexpr (kFrom == DType::kI8) {
    const signed char* p = static_cast<const signed char*>(from);
    for (std::int64_t i = 0; i < n; ++i) to[i] = static_cast<float>(p[i]);
    return;
  }
  static_assert(kFrom == DType::kI8 || kFrom == DType::kF8E4M3);
  const unsigned char* p = static_cast<const unsigned char*>(from);
  std::int64_t i = 0;
  for (; i + F32::kLanes <= n; i += F32::kLanes) store(to + i, load_f8(p + i));
  if (i == n) return;
  unsigned char tail[F32::kLanes] = {};
  float converted[F32::kLanes];
  for (std::int64_t j = i; j < n; ++j) tail[j - i] = p[j];
  store(converted, load_f8(tail));
  for (std::int64_t j = i; j < n; ++j) to[j] = converted[j - i];
}

inline void load_codes(const void* from, DType dtype, std::int64_t n, float* to) {
  with_code_dtype(dtype, [&](auto stored) { load_codes_as<stored.kDType>(from, n, to); });
}

/// Loads n elements of a scaled cache, times their scale.
template <class Scalar>
inline void load_scaled_row(const void* from, DType dtype, std::int64_t n, Scalar scale,
                            Scalar* to) {
  constexpr std::int64_t kChunk = 64;
  float chunk[kChunk];
  for (std::int64_t i = 0; i < n; i += kChunk) {
    const std::int64_t count = smaller(kChunk, n - i);
    load_codes(at(from, dtype, i), dtype, count, chunk);
    for (std::int64_t j = 0; j < count; ++j) to[i + j] = static_cast<Scalar>(chunk[j]) * scale;
  }
}

/// Loads the elements of one slot and head; those of scaled caches are dequantised.
template <KvPart kPart, class Scalar>
inline void load_kv_row(const AttentionParams& params, const Sequence& sequence, std::int64_t head,
                        std::int64_t slot, std::int64_t dim, Scalar* to) {
  const Operand& operand = kv_operand<kPart>(params);
  const KvLayout& layout = params.kv_layout;
  const std::int64_t row = kv_row<kPart>(params, sequence, head, slot);
  const float* scales = kPart == KvPart::kKeys ? layout.k_scales : layout.v_scales;
  if (scales == nullptr) {
    load_row(at(operand.data, operand.dtype, row), operand.dtype, dim, to);
    return;
  }
  const Scalar scale = static_cast<Scalar>(
      scales[slot * layout.scale_slot_stride + head * layout.scale_head_stride]);
  load_scaled_row(at(operand.data, operand.dtype, row), operand.dtype, dim, scale, to);
}

/// The keys or values of a span, in any cache layout: in place where they are in consecutive slots
/// of the compute type, else staged. With staging.dim above the row's own length they are staged
/// too.
template <KvPart kPart, class Scalar>
inline RowBlock<const Scalar> load_kv(const KeySpan& span, Staging<Scalar> staging) {
  const AttentionParams& params = span.params;
  const Sequence& sequence = span.sequence;
  const Operand& operand = kv_operand<kPart>(params);
  const std::int64_t dim = kv_dim<kPart>(params);
  const KvLayout& layout = params.kv_layout;
  const std::int64_t first = kv_slot(layout, sequence, span.begin);
  if (layout.plain()) {
    const std::int64_t offset = kPart == KvPart::kKeys ? sequence.k : sequence.v;
    return load_block(head_rows(operand, offset, span.kv_head, first), span.count(), dim, staging);
  }
  if (slots_contiguous(layout, sequence, span.begin, span.end) &&
      operand.dtype == kDTypeOf<Scalar> && staging.dim == dim && !staging.always) {
    const std::int64_t row = kv_row<kPart>(params, sequence, span.kv_head, first);
    return {static_cast<const Scalar*>(operand.data) + row, operand.token_stride};
  }
  for (std::int64_t key = span.begin; key < span.end; ++key) {
    Scalar* to = staging.data + (key - span.begin) * staging.stride;
    load_kv_row<kPart>(params, sequence, span.kv_head, kv_slot(layout, sequence, key), dim, to);
    for (std::int64_t i = dim; i < staging.dim; ++i) to[i] = 0;
  }
  return {staging.data, staging.stride};
}

}  // namespace
}  // namespace ladon::cpu
