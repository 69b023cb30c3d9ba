// The addresses of a block's keys and values, for kernels that read them in their stored type.
#pragma once

#include <cstdint>

#include "cpu/kernels/kv_blocks.inl"
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

/// Rows of a task's heads, to prefetch. A task that has all heads prefetches them in the order in
/// which they are stored, token by token, whatever the order in which they are worked on: hardware
/// prefetchers follow, and one core reads 35 GB/s instead of 23, of the 42 of a plain read (Zen 5,
/// tokens of 2 and 8 KiB). Parts of tokens are prefetched head by head, as they are worked on; in
/// the other order they were up to 10 % slower.
struct RowsAhead {
  const char* const* rows;  // of the first head
  std::int64_t head_bytes;  // from one head to the next
  std::int64_t bytes;       // of a head
  bool whole_tokens;
  // The next row, and the heads of a token whose rows are prefetched.
  std::int64_t token = 0;
  std::int64_t head = 0;
  std::int64_t first_head = 0;
  std::int64_t end_head;
  std::int64_t count = 0;  // of rows, for advance()
  std::int64_t done = 0;   // work since the last row, times count

  RowsAhead(const AttentionParams& params, const Operand& operand, const char* const* all_rows,
            std::int64_t heads, std::int64_t dim)
      : rows(all_rows), whole_tokens(heads == params.num_kv_heads), end_head(heads) {
    const auto size = static_cast<std::int64_t>(size_of(operand.dtype));
    head_bytes = operand.head_stride * size;
    bytes = dim * size;
  }

  /// Continues at a token and head, where the order is not that of memory.
  void move_to(std::int64_t at_token, std::int64_t at_head) {
    if (whole_tokens) return;
    token = at_token;
    head = first_head = at_head;
    end_head = at_head + 1;
  }
  /// Starts with the share of one head, and has as many rows for advance().
  void start_share(std::int64_t of_head, std::int64_t tokens) {
    count = tokens;
    move_to(0, of_head);
    if (!whole_tokens) return;
    token = of_head * tokens / end_head;
    head = of_head * tokens % end_head;
  }
  void prefetch_next() {
    prefetch_row(rows[token] + head * head_bytes, bytes);
    if (++head < end_head) return;
    head = first_head;
    ++token;
  }
  /// Call after `work` of `total` units, which must be the same in every call: prefetches `count`
  /// rows evenly.
  void advance(std::int64_t work, std::int64_t total) {
    for (done += work * count; done >= total; done -= total) prefetch_next();
  }
};

// Tokens that are scored, or whose values are added, at a time where tokens are streamed: sums of a
// row are carried from one group to the next. With 4, four query rows take 8 % longer; with 16, the
// prefetches are too far from their use (Zen 5).
inline constexpr std::int64_t kStreamedKeys = 8;

/// Rows that are streamed, to prefetch: all heads of a block's tokens in the order in which they
/// are stored, those of K, then those of V, then those of the next block's K. They are a group
/// ahead of what is read, because a group's last token is read before its first token's last head.
class StreamAhead {
 public:
  /// `tokens` of K or V.
  struct Part {
    const char* const* rows;  // of the first head
    std::int64_t tokens;
    std::int64_t head_bytes;  // from one head to the next
    std::int64_t bytes;       // of a head
  };

  /// What is about to be read, and what after it.
  StreamAhead(const Part& now, const Part& later, std::int64_t heads)
      : parts_{now, later},
        heads_(heads),
        token_(larger(kStreamedKeys, kLeastBytes / (heads * now.bytes))) {
    if (token_ >= now.tokens) start_later(token_ - now.tokens);
  }
  /// Call before as many rows are read.
  void prefetch(std::int64_t rows) {
    for (; rows > 0 && token_ < parts_[part_].tokens; --rows) {
      const Part& part = parts_[part_];
      prefetch_row(part.rows[token_] + head_ * part.head_bytes, part.bytes);
      if (++head_ < heads_) continue;
      head_ = 0;
      if (++token_ == part.tokens && part_ == 0) start_later(0);
    }
  }

 private:
  void start_later(std::int64_t token) {
    part_ = 1;
    token_ = token;
  }

  // Half of it was 10 to 20 % slower where tokens are of 1 KiB.
  static constexpr std::int64_t kLeastBytes = 16384;

  Part parts_[2];
  std::int64_t heads_;
  int part_ = 0;
  std::int64_t token_;
  std::int64_t head_ = 0;
};

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
