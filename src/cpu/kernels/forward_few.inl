// Forward attention for a few query rows: decoding, one or some tokens against many keys.
//
// Lanes run along the head dimension for q.k and for the output, and along keys for the softmax:
// with one row there are no queries to fill lanes with. All rows of a KV head (its group of query
// heads, times the tokens) are served by one read of each K and V byte. The bound is that read:
// 2 * head_dim * size bytes a key at memory speed, while the arithmetic is 4 * head_dim flops a key
// and row. The driver cuts the keys at fixed places and merges the parts, so threads share one
// sequence's keys without changing a bit.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/dot.inl"
#include "cpu/kernels/forward_tile.inl"

namespace ladon::cpu {
namespace {

// Up to here a dot product per row and key (head_dim / lanes FMAs and a horizontal sum) beats a
// tile whose lanes are mostly empty (head_dim FMAs a key, whatever the rows).
inline constexpr std::int64_t kFewRows = 8;

template <class V>
struct ForwardFewScratch {
  using Scalar = typename V::Scalar;
  std::int64_t head_dim;   // padded to whole vectors
  std::int64_t value_dim;  // padded to whole vectors
  Scalar* q;               // [kFewRows][head_dim], scaled
  Scalar* out;             // [kFewRows][value_dim]
  Scalar* scores;          // [kFewRows][kKeyBlock]
  Scalar* extra;           // [kFewRows][kKeyBlock]
  Scalar* keep;            // [kFewRows][kKeyBlock]
  Scalar* staging;         // K or V block
  std::size_t bytes;

  ForwardFewScratch(const AttentionParams& params, void* base) {
    ScratchArena arena(base);
    head_dim = round_up(params.head_dim, V::kLanes);
    value_dim = round_up(params.value_dim, V::kLanes);
    q = arena.take<Scalar>(kFewRows * head_dim);
    out = arena.take<Scalar>(kFewRows * value_dim);
    scores = arena.take<Scalar>(kFewRows * kKeyBlock);
    extra = arena.take<Scalar>(kFewRows * kKeyBlock);
    keep = arena.take<Scalar>(kFewRows * kKeyBlock);
    staging = arena.take<Scalar>(kKeyBlock * larger(head_dim, value_dim));
    bytes = arena.used();
  }
};

/// Asks for rows [begin, end) of one head before they are needed. Rows of a head lie a whole token
/// apart, which the hardware's prefetcher does not follow; on Zen 4 this makes f32 decoding 1.3 and
/// bf16 decoding 1.7 times as fast (8 KV heads of 128, 8192 keys).
template <KvPart kPart>
inline void prefetch_kv(const AttentionParams& params, const Sequence& sequence, std::int64_t head,
                        std::int64_t begin, std::int64_t end) {
  constexpr std::int64_t kLine = 64;
  const Operand& operand = kv_operand<kPart>(params);
  const std::int64_t dim = kPart == KvPart::kKeys ? params.head_dim : params.value_dim;
  const std::int64_t bytes = dim * static_cast<std::int64_t>(size_of(operand.dtype));
  for (std::int64_t key = begin; key < end; ++key) {
    const std::int64_t slot = kv_slot(params.kv_layout, sequence, key);
    const char* start = static_cast<const char*>(
        at(operand.data, operand.dtype, kv_row<kPart>(params, sequence, head, slot)));
    for (std::int64_t byte = 0; byte < bytes; byte += kLine) __builtin_prefetch(start + byte, 0, 2);
  }
}

/// One row's scores of a block to weights. Lanes past the block's keys become masked weights, by
/// selection: whatever another call left there in scores, extra or keep goes no further. Gives
/// the factor for what was summed before.
template <class V>
inline typename V::Scalar softmax_row(const BlockRules<typename V::Scalar>& block, std::int64_t row,
                                      std::int64_t key_count, typename V::Scalar* scores,
                                      typename V::Scalar* maximum,
                                      typename V::Scalar* denominator) {
  using Scalar = typename V::Scalar;
  using C = MathConstants<Scalar>;
  alignas(64) static constexpr auto kIota = [] {
    struct {
      Scalar values[V::kLanes];
    } iota{};
    for (int i = 0; i < V::kLanes; ++i) iota.values[i] = static_cast<Scalar>(i);
    return iota;
  }();
  const V lanes = load<V>(kIota.values);
  const V nothing = broadcast<V>(-C::kInfinity);
  const V first = broadcast<V>(block.first[row]);
  const V last = broadcast<V>(block.last[row]);
  const V position = broadcast<V>(block.position[row]);
  const V slope = broadcast<V>(block.slope[row]);
  V block_maximum = nothing;
  for (std::int64_t i = 0; i < key_count; i += V::kLanes) {
    const V key = lanes + broadcast<V>(static_cast<Scalar>(i));
    const V score = apply_rules<V, false>(block, load<V>(scores + i), key, first, last, position,
                                          slope, row * kKeyBlock + i, nullptr);
    store(scores + i, score);
    block_maximum = max(score, block_maximum);
  }
  const Scalar top = largest(block_maximum);
  const Scalar old_maximum = *maximum;
  if (old_maximum + kRescaleGrowth<V> < top) *maximum = top;
  const V new_maximum = broadcast<V>(*maximum);
  const V log2e = broadcast<V>(C::kLog2e);
  alignas(64) Scalar factor[V::kLanes];
  store(factor, exp2((broadcast<V>(old_maximum) - new_maximum) * log2e));
  const V masked = broadcast<V>(static_cast<Scalar>(-0.0));
  V total = zero<V>();
  for (std::int64_t i = 0; i < key_count; i += V::kLanes) {
    const V score = load<V>(scores + i);
    V weight = exp2((score - new_maximum) * log2e);
    total = total + weight;
    if (block.keep != nullptr) weight = weight * load<V>(block.keep + row * kKeyBlock + i);
    store(scores + i, select(identical(score, nothing), masked, weight));
  }
  *denominator = *denominator * factor[0] + sum(total);
  return factor[0];
}

template <class V>
void forward_few(const AttentionParams& params, const ForwardTask& task, void* memory) {
  using Scalar = typename V::Scalar;
  const ForwardFewScratch<V> scratch(params, memory);
  const Sequence& sequence = params.sequences[task.sequence];
  const std::int64_t first_head = task.kv_head * params.group;
  Rows<Scalar> rows;
  set_rows(rows, params, sequence, first_head, params.group, task.row_begin, task.row_count,
           task.key_begin, task.key_end);

  const Scalar scale = narrow<Scalar>(params.rules.scale);
  for (std::int64_t r = 0; r < rows.count; ++r) {
    Scalar* q = scratch.q + r * scratch.head_dim;
    const std::int64_t start =
        sequence.q + rows.token[r] * params.q.token_stride + rows.head[r] * params.q.head_stride;
    load_row(at(params.q.data, params.q.dtype, start), params.q.dtype, params.head_dim, q);
    for (std::int64_t i = 0; i < params.head_dim; ++i) q[i] *= scale;
    for (std::int64_t i = params.head_dim; i < scratch.head_dim; ++i) q[i] = 0;
  }
  for (std::int64_t i = 0; i < rows.count * scratch.value_dim; ++i) scratch.out[i] = 0;
  Scalar maximum[kFewRows];
  Scalar denominator[kFewRows] = {};
  for (Scalar& value : maximum) value = MathConstants<Scalar>::kLowest;

  BlockRules<Scalar> block;
  for (std::int64_t begin = rows.some_first; begin < rows.some_end; begin += kKeyBlock) {
    const std::int64_t end = smaller(begin + kKeyBlock, rows.some_end);
    const std::int64_t count = end - begin;
    prefetch_kv<KvPart::kValues>(params, sequence, task.kv_head, begin, end);
    const Block<Scalar> keys = load_kv<KvPart::kKeys>(params, sequence, task.kv_head, begin, end,
                                                      scratch.head_dim, scratch.staging);
    dot_products<V>(rows.count, count, scratch.head_dim, scratch.q, scratch.head_dim, keys,
                    scratch.scores, kKeyBlock);
    set_block(block, params, sequence, rows, begin, count, scratch.extra, scratch.keep, kKeyBlock,
              1);
    for (std::int64_t r = 0; r < rows.count; ++r) {
      const Scalar factor = softmax_row<V>(block, r, count, scratch.scores + r * kKeyBlock,
                                           maximum + r, denominator + r);
      if (factor == 1) continue;
      Scalar* out = scratch.out + r * scratch.value_dim;
      for (std::int64_t i = 0; i < scratch.value_dim; ++i) out[i] *= factor;
    }
    prefetch_kv<KvPart::kKeys>(params, sequence, task.kv_head, end,
                               smaller(end + kKeyBlock, rows.some_end));
    const Block<Scalar> values = load_kv<KvPart::kValues>(params, sequence, task.kv_head, begin,
                                                          end, scratch.value_dim, scratch.staging);
    const bool guard = block.masks() && !all_finite(values, count, params.value_dim);
    gemm_with_guard<V, Layout::kRows, Guard::kMaskedA>(
        guard, rows.count, scratch.value_dim, count, scratch.scores, kKeyBlock, values.data,
        values.stride, scratch.out, scratch.value_dim, true);
  }

  for (std::int64_t r = 0; r < rows.count; ++r) {
    const RowFinish finish =
        finish_row(params, task.output, rows.head[r], maximum[r], denominator[r]);
    Scalar* out = scratch.out + r * scratch.value_dim;
    const Scalar factor = static_cast<Scalar>(finish.factor);
    for (std::int64_t i = 0; i < params.value_dim; ++i) {
      out[i] = denominator[r] == 0 ? Scalar{0} : out[i] * factor;
    }
    write_row(task.output, rows.token[r], rows.head[r] - first_head, params.value_dim, out,
              finish.lse);
  }
}

template <class V>
std::size_t forward_few_scratch(const AttentionParams& params) {
  return ForwardFewScratch<V>(params, nullptr).bytes;
}

}  // namespace
}  // namespace ladon::cpu
