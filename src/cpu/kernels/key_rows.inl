// The addresses of a block's keys and values, for kernels that read them in their stored type.
#pragma once

#include <cstdint>

#include "cpu/kernels/score_rules.inl"
#include "cpu/kernels/stored_rows.inl"

namespace ladon::cpu {
namespace {

/// A block of keys: the slot of each, and its rows of K and V at the task's first head.
struct KeyRows {
  std::int64_t begin = 0;
  std::int64_t count = 0;
  std::int64_t slots[kKeyBlock];
  const char* k[kKeyBlock];
  const char* v[kKeyBlock];
};

/// Looks up the block that begins at key `begin`. It is empty when `begin` is not below `end`.
inline void find_rows(KeyRows& block, const AttentionParams& params, const Sequence& sequence,
                      std::int64_t kv_head, std::int64_t begin, std::int64_t end) {
  block.begin = begin;
  block.count = begin < end ? smaller(kKeyBlock, end - begin) : 0;
  const std::int64_t k_size = static_cast<std::int64_t>(size_of(params.k.dtype));
  const std::int64_t v_size = static_cast<std::int64_t>(size_of(params.v.dtype));
  for (std::int64_t i = 0; i < block.count;) {
    // Slots are looked up once for a run of consecutive ones.
    const std::int64_t slot = kv_slot(params.kv_layout, sequence, begin + i);
    const std::int64_t end_of_run =
        smaller(block.count, i + consecutive_slots(params.kv_layout, sequence, begin + i));
    const auto* k = static_cast<const char*>(
        at(params.k.data, params.k.dtype, kv_row<KvPart::kKeys>(params, sequence, kv_head, slot)));
    const auto* v = static_cast<const char*>(at(
        params.v.data, params.v.dtype, kv_row<KvPart::kValues>(params, sequence, kv_head, slot)));
    const std::int64_t k_step = params.k.token_stride * k_size;
    const std::int64_t v_step = params.v.token_stride * v_size;
    for (std::int64_t first = i; i < end_of_run; ++i) {
      block.slots[i] = slot + (i - first);
      block.k[i] = k + (i - first) * k_step;
      block.v[i] = v + (i - first) * v_step;
    }
  }
}

/// Prefetches one head's elements of some rows: hardware prefetchers stop at the end of a page, and
/// reads alternate between K and V.
inline void prefetch_rows(const Operand& operand, const char* const* rows, std::int64_t begin,
                          std::int64_t end, std::int64_t head, std::int64_t dim) {
  const std::int64_t size = static_cast<std::int64_t>(size_of(operand.dtype));
  for (std::int64_t i = begin; i < end; ++i) {
    prefetch_row(rows[i] + head * operand.head_stride * size, dim * size);
  }
}

/// A block's rows of K or V for the products: in place where load_stored() can read them, else
/// converted into the staging buffer, which holds one head.
template <class V, KvPart kPart>
class BlockOperand {
 public:
  using Scalar = typename V::Scalar;

  BlockOperand(const AttentionParams& params, const Sequence& sequence, const KeyRows& block,
               std::int64_t kv_head, Scalar* staging)
      : dtype_(kv_operand<kPart>(params).dtype), rows_(kPart == KvPart::kKeys ? block.k : block.v) {
    const Operand& operand = kv_operand<kPart>(params);
    if (loads_stored<V>(dtype_)) {
      head_bytes_ = operand.head_stride * static_cast<std::int64_t>(size_of(dtype_));
      return;
    }
    dtype_ = kDTypeOf<Scalar>;
    const KeySpan span{params, sequence, kv_head, block.begin, block.begin + block.count};
    const RowBlock<const Scalar> staged =
        load_kv<kPart>(span, Staging<Scalar>{staging, kv_dim<kPart>(params)});
    for (std::int64_t i = 0; i < block.count; ++i) {
      staged_[i] = reinterpret_cast<const char*>(staged.row(i));
    }
    rows_ = staged_;
  }
  BlockOperand(const BlockOperand&) = delete;
  BlockOperand& operator=(const BlockOperand&) = delete;

  DType dtype() const { return dtype_; }
  /// The rows of KV head `head`, counted from the task's first.
  StoredRows rows(std::int64_t head) const { return {rows_, head * head_bytes_}; }

 private:
  DType dtype_;
  const char* const* rows_;
  std::int64_t head_bytes_ = 0;
  const char* staged_[kKeyBlock];
};

}  // namespace
}  // namespace ladon::cpu
