// The scales of a block of int8 or fp8 keys and values, for decoding: those of all KV heads of a
// task are copied together, because a slot has the scales of its heads side by side. Head by head
// it took a quarter of the time outside the products, and the lines were not prefetched.
#pragma once

#include <cstdint>

#include "cpu/kernels/key_rows.inl"

namespace ladon::cpu {
namespace {

template <class V>
class BlockScales {
 public:
  using Scalar = typename V::Scalar;

  /// Elements of memory that a task needs.
  static std::int64_t size(const AttentionParams& params, std::int64_t heads) {
    return params.kv_layout.k_scales == nullptr ? 0 : 2 * heads * kKeyBlock;
  }

  /// For KV heads [first_head, first_head + heads).
  BlockScales(const AttentionParams& params, std::int64_t first_head, std::int64_t heads,
              Scalar* memory)
      : layout_(params.kv_layout),
        heads_(heads),
        keys_(part(layout_.k_scales, params.k.dtype, first_head, memory)),
        values_(part(layout_.v_scales, params.v.dtype, first_head, memory + heads * kKeyBlock)) {}

  /// [key] of one head, counted from the first, with zeros up to a whole vector. Null where there
  /// are none, or where staged elements are dequantised already.
  const Scalar* keys(std::int64_t head) const { return of(keys_, head); }
  const Scalar* values(std::int64_t head) const { return of(values_, head); }

  void prefetch(const KeyRows& block) const {
    // Where the scales of a slot are not contiguous, those of the first heads.
    const std::int64_t bytes =
        smaller(4 * kCacheLine, ((heads_ - 1) * layout_.scale_head_stride + 1) *
                                    static_cast<std::int64_t>(sizeof(float)));
    for (const Part& part : {keys_, values_}) {
      for (std::int64_t i = 0; part.stored != nullptr && i < block.count; ++i) {
        prefetch_row(reinterpret_cast<const char*>(from(part, block.slots[i])), bytes);
      }
    }
  }

  void load(const KeyRows& block) const {
    for (const Part& part : {keys_, values_}) {
      if (part.stored != nullptr) load(part, block);
    }
  }

 private:
  struct Part {
    const float* stored;  // of the first head, in slot 0
    Scalar* copy;         // [head][kKeyBlock]
  };

  Part part(const float* stored, DType dtype, std::int64_t first_head, Scalar* copy) const {
    if (stored == nullptr || !loads_stored<V>(dtype)) return {nullptr, nullptr};
    return {stored + first_head * layout_.scale_head_stride, copy};
  }
  const float* from(const Part& part, std::int64_t slot) const {
    return part.stored + slot * layout_.scale_slot_stride;
  }
  static const Scalar* of(const Part& part, std::int64_t head) {
    return part.stored == nullptr ? nullptr : part.copy + head * kKeyBlock;
  }

  void load(const Part& part, const KeyRows& block) const {
    constexpr std::int64_t kTogether = 8;
    const std::int64_t stride = layout_.scale_head_stride;
    const std::int64_t together = stride == 1 ? heads_ - heads_ % kTogether : std::int64_t{0};
    for (std::int64_t i = 0; i < block.count; ++i) {
      const float* const scales = from(part, block.slots[i]);
      Scalar* const to = part.copy + i;
      for (std::int64_t head = 0; head < together; head += kTogether) {
        LADON_UNROLL
        for (std::int64_t n = 0; n < kTogether; ++n) {
          to[(head + n) * kKeyBlock] = static_cast<Scalar>(scales[head + n]);
        }
      }
      for (std::int64_t head = together; head < heads_; ++head) {
        to[head * kKeyBlock] = static_cast<Scalar>(scales[head * stride]);
      }
    }
    for (std::int64_t i = block.count; i < round_up(block.count, V::kLanes); ++i) {
      for (std::int64_t head = 0; head < heads_; ++head) part.copy[head * kKeyBlock + i] = 0;
    }
  }

  const KvLayout& layout_;
  std::int64_t heads_;
  Part keys_;
  Part values_;
};

}  // namespace
}  // namespace ladon::cpu
