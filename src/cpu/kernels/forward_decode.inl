// Forward attention for decoding: a few query rows, of one or some tokens, against many keys.
//
// Lanes run along the head dimension for q.k and for the output, and along keys for the softmax:
// one row has no other queries to fill lanes with. All rows of a KV head (its group of query heads,
// times the tokens) share one read of each K and V byte, converted to the compute type in
// registers. That read is the bound: 2 * head_dim * size bytes per key at memory speed, while the
// arithmetic is 4 * head_dim flops per key and row. The driver splits the keys at fixed positions
// and merges the parts, so that threads share one sequence's keys without changing a bit.
//
// A task takes several KV heads where it can: the heads of a token are contiguous, and walking a
// block of tokens head by head reads it from one end to the other. One head at a time over all keys
// touches a new page with every row, and pays a memory latency for it: about half as fast (Zen 4,
// 8 KV heads of 128, 8192 keys). Measured there, bf16, 32768 keys: 65 to 77 % of the memory read
// for 4 rows per KV head, 76 to 82 % for one. One core reaches 16 GB/s of the 24 that it can read:
// it prefetches line by line, and has a limited number of requests in flight.
//
// In AVX2's 16 registers, four rows and a key of 128 in L2: 31 ns in bf16, of which the FMAs alone
// would take 18; q.k 12 (a quarter of it horizontal sums), the weighted sum 11, the rest of a
// block 5.
//
// Lines are prefetched in the order of memory where a task has all heads (RowsAhead), because each
// prefetch holds one of a core's few miss buffers until it is served, unless a hardware prefetcher
// has run ahead: with AVX-512 on Zen 5, 8 KV heads, 8 % less time in bf16 and 6 to 14 % less in
// int8.
//
// Long tokens of caches without scales are streamed instead (streams_tokens()): scores of all
// heads, then values of all heads, both in the order of memory, a few tokens at a time; a block's
// sums are carried in L1 from one group of tokens to the next. bf16 on Zen 5, both cores, from
// memory: 8 to 17 % less time than with blocks that are prefetched into L2; from L3 the same.
//
// Tried and lost: streaming without any prefetch (as slow as with blocks: the window of a core does
// not reach far enough), or with one that is some heads of each of a group's tokens ahead (with 32
// heads as fast, with 8 to 24 up to twice the time); prefetching every second line (half as fast);
// prefetching a task's first block at once; on AVX2, two rows by four keys (keys converted twice),
// weights at any stride (pointers of four rows do not fit the general registers), 16 bf16 values by
// one load, a shift and a mask, put in order at the end of a block (1 row 3 % faster, 8 rows 4 %
// slower), and unrolling q.k by 2.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/block_scales.inl"
#include "cpu/kernels/element_decode.inl"
#include "cpu/kernels/softmax.inl"

namespace ladon::cpu {
namespace {

// Most rows of all KV heads of a task: their q and their sums, 96 KiB at head_dim 128, share L2
// with the keys and values that are being prefetched.
inline constexpr std::int64_t kDecodeStates = 64;

template <class V>
struct ForwardDecodeScratch {
  using Scalar = typename V::Scalar;
  std::int64_t head_dim;   // padded to whole vectors
  std::int64_t value_dim;  // padded to whole vectors
  Scalar* q;               // [state][head_dim], in the layout of Products
  Scalar* out;             // [state][value_dim]
  Scalar* carried;         // [state][value_dim]: a block's sums, where tokens are streamed
  Scalar* scores;          // [state][kKeyBlock]
  Scalar* extra;           // [kDecodeRows][kKeyBlock]
  Scalar* keep;            // [kDecodeRows][kKeyBlock]
  Scalar* staging;         // a block of K or V
  Scalar* scales;          // of BlockScales
  std::size_t bytes;

  ForwardDecodeScratch(const AttentionParams& params, Scratch base) {
    ScratchArena arena(base);
    head_dim = round_up(params.head_dim, V::kLanes);
    value_dim = round_up(params.value_dim, V::kLanes);
    const std::int64_t states = smaller(kDecodeStates, params.num_kv_heads * kDecodeRows);
    q = arena.take<Scalar>(states * head_dim);
    out = arena.take<Scalar>(states * value_dim);
    carried = arena.take<Scalar>(states * value_dim);
    scores = arena.take<Scalar>(states * kKeyBlock);
    extra = arena.take<Scalar>(kDecodeRows * kKeyBlock);
    keep = arena.take<Scalar>(kDecodeRows * kKeyBlock);
    staging = arena.take<Scalar>(kKeyBlock * larger(head_dim, value_dim));
    scales = arena.take<Scalar>(
        BlockScales<V>::size(params, smaller(kDecodeStates, params.num_kv_heads)));
    bytes = arena.used();
  }
};

/// The output of KV head `head`, counted from the task's first.
inline ForwardOutput output_of(ForwardOutput output, std::int64_t head) {
  output.data = at(output.data, output.dtype, head * output.kv_head_stride);
  if (output.lse.data != nullptr) {
    output.lse.data = at(output.lse.data, output.lse.is_f64 ? DType::kF64 : DType::kF32,
                         head * output.lse_kv_head_stride);
  }
  return output;
}

/// The rows of all KV heads of a task, with their running softmax and sums.
template <class V, class Products>
class DecodeRows {
 public:
  using Scalar = typename V::Scalar;

  DecodeRows(const AttentionParams& params, const ForwardTask& task, Scratch memory)
      : params_(params),
        task_(task),
        sequence_(params.sequences[task.sequence]),
        streams_(Products::kStreams && streams_tokens(params, task.kv_head_count)),
        scratch_(params, memory),
        scales_(params, task.kv_head, task.kv_head_count, scratch_.scales) {
    for (Scalar& value : maximum_) value = MathConstants<Scalar>::kLowest;
    for (std::int64_t head = 0; head < task.kv_head_count; ++head) load_queries(head);
  }

  void attend() {
    // Memory is kept busy all the time: values are prefetched while their keys are scored, and keys
    // of the next block while values are summed.
    KeyRows blocks[2];
    find_rows(blocks[0], params_, sequence_, task_.kv_head, rows_.some_first, rows_.some_end);
    const std::int64_t end = rows_.some_end;
    for (std::int64_t i = 0; blocks[i].count > 0; i = 1 - i) {
      const KeyRows& block = blocks[i];
      KeyRows& next = blocks[1 - i];
      find_rows(next, params_, sequence_, task_.kv_head, block.begin + kKeyBlock, end);
      scales_.prefetch(next);
      score(block);
      scales_.load(block);
      if constexpr (Products::kStreams) {
        if (streams_) {
          stream_values(block, next);
          continue;
        }
      }
      for (std::int64_t head = 0; head < task_.kv_head_count; ++head) {
        RowsAhead ahead(params_, params_.k, next.k, task_.kv_head_count, params_.head_dim);
        ahead.start_share(head, next.count);
        typename Products::WeightScale weight_scales[kDecodeRows];
        weigh(block, head, weight_scales);
        Products::add_values(values_of(block, head, rules_.masks(), ahead), weight_scales);
      }
    }
  }

  void finish() {
    for (std::int64_t head = 0; head < task_.kv_head_count; ++head) {
      choose(head);
      const ForwardOutput output = output_of(task_.output, head);
      for (std::int64_t r = 0; r < rows_.count; ++r) {
        const std::int64_t state = state_of(head, r);
        const RowFinish end =
            finish_row(params_, output, rows_.head[r], maximum_[state], denominator_[state]);
        Scalar* out = scratch_.out + state * scratch_.value_dim;
        const Scalar factor = static_cast<Scalar>(end.factor);
        const bool empty = denominator_[state] == 0;
        for (std::int64_t i = 0; i < scratch_.value_dim; i += V::kLanes) {
          store(out + i, empty ? zero<V>() : load<V>(out + i) * broadcast<V>(factor));
        }
        write_row(output, rows_.token[r], rows_.head[r] % params_.group, params_.value_dim, out,
                  end.lse);
      }
    }
  }

 private:
  std::int64_t state_of(std::int64_t head, std::int64_t row) const {
    return head * task_.row_count + row;
  }
  Scalar* scores_of(std::int64_t head) const {
    return scratch_.scores + state_of(head, 0) * kKeyBlock;
  }

  /// Sets rows_ to the rows of one KV head; between heads of a task only their numbers differ.
  void choose(std::int64_t head) {
    if (chosen_head_ >= 0) {
      const std::int64_t step = (head - chosen_head_) * params_.group;
      for (std::int64_t r = 0; r < rows_.count; ++r) rows_.head[r] += step;
      chosen_head_ = head;
      return;
    }
    chosen_head_ = head;
    set_rows(rows_, params_, sequence_,
             {.first_head = (task_.kv_head + head) * params_.group,
              .heads_per_token = params_.group,
              .begin = task_.row_begin,
              .count = task_.row_count},
             {task_.key_begin, task_.key_end});
  }

  void load_queries(std::int64_t head) {
    choose(head);
    const QueryOperand queries{params_.q, sequence_.q, rows_, params_.head_dim};
    for (std::int64_t r = 0; r < rows_.count; ++r) {
      Scalar* q = scratch_.q + state_of(head, r) * scratch_.head_dim;
      Scalar* out = scratch_.out + state_of(head, r) * scratch_.value_dim;
      query_factor_[state_of(head, r)] =
          Products::load_query(params_, queries.start(r), scratch_.head_dim, q);
      for (std::int64_t i = 0; i < scratch_.value_dim; ++i) out[i] = 0;
    }
  }

  /// q.k of all heads: a few keys at a time, head by head, in the order in which they are stored.
  /// Never inlined: GCC 12 allocates registers worse inside a larger function (4 % of f32 decoding
  /// on AVX-512).
  [[gnu::noinline]] void score(const KeyRows& block) {
    const BlockOperand<V, KvPart::kKeys> keys(params_, sequence_, block, task_.kv_head,
                                              scratch_.staging);
    RowsAhead values(params_, params_.v, block.v, task_.kv_head_count, params_.value_dim);
    StreamAhead stream(keys_part(block), values_part(block), task_.kv_head_count);
    Products::with_keys(keys.dtype(), [&](auto stored) {
      const std::int64_t step = Products::keys_at_once(task_.row_count);
      for (std::int64_t key = 0; key < block.count; key += step) {
        const std::int64_t count = smaller(step, block.count - key);
        for (std::int64_t head = 0; head < task_.kv_head_count; ++head) {
          if (streams_) {
            stream.prefetch(count);
          } else {
            values.move_to(key, head);
            for (std::int64_t i = 0; i < count; ++i) values.prefetch_next();
          }
          Products::template score<decltype(stored)::kDType>(
              {.rows = task_.row_count,
               .width = count,
               .depth = Products::length(params_.head_dim)},
              RowBlock<Scalar>{scratch_.q + state_of(head, 0) * scratch_.head_dim,
                               scratch_.head_dim},
              keys.rows(head).from(key), scores_of(head) + key);
        }
      }
    });
  }

  /// Converts one head's scores to weights.
  void weigh(const KeyRows& block, std::int64_t head,
             typename Products::WeightScale* weight_scales) {
    choose(head);
    const Scalar* const k_scales = scales_.keys(head);
    const Scalar* const v_scales = scales_.values(head);
    set_block(
        rules_, params_, sequence_, rows_, {block.begin, block.begin + block.count},
        RuleScratch<Scalar>{scratch_.extra, scratch_.keep, {.row_step = kKeyBlock, .key_step = 1}});
    const V scale = broadcast<V>(narrow<Scalar>(params_.rules.scale));
    for (std::int64_t r = 0; r < rows_.count; ++r) {
      const std::int64_t state = state_of(head, r);
      Scalar* const scores = scores_of(head) + r * kKeyBlock;
      typename Products::WeightScale::template Watch<V> watch;
      const ScoreRow<Scalar> row{r, block.count, scores, v_scales};
      const SoftmaxState<Scalar> softmax{maximum_ + state, denominator_ + state};
      Scalar factor;
      if (k_scales != nullptr) {
        const V row_factor = broadcast<V>(query_factor_[state]);
        factor = softmax_row<V, false>(
            rules_, row,
            [&](std::int64_t i) {
              return Products::load_scores(scores + i) * (load<V>(k_scales + i) * row_factor);
            },
            softmax, watch);
      } else {
        factor = softmax_row<V, Products::kScaled>(
            rules_, row,
            [&](std::int64_t i) {
              return Products::kScaled ? load<V>(scores + i) : load<V>(scores + i) * scale;
            },
            softmax, watch);
      }
      weight_scales[r] = watch.result();
      if (factor == 1) continue;
      Scalar* out = scratch_.out + state * scratch_.value_dim;
      for (std::int64_t i = 0; i < scratch_.value_dim; ++i) out[i] *= factor;
    }
  }

  /// Adds the weighted values of all heads in the order in which they are stored.
  void stream_values(const KeyRows& block, const KeyRows& next) {
    typename Products::WeightScale weight_scales[kDecodeRows];
    bool masks = false;
    for (std::int64_t head = 0; head < task_.kv_head_count; ++head) {
      weigh(block, head, weight_scales);
      masks = masks || rules_.masks();
    }
    const RowsAhead nothing(params_, params_.v, block.v, task_.kv_head_count, params_.value_dim);
    StreamAhead stream(values_part(block), keys_part(next), task_.kv_head_count);
    if (masks) {  // values may be NaN where they are masked
      for (std::int64_t head = 0; head < task_.kv_head_count; ++head) {
        Products::add_values(values_of(block, head, true, nothing), weight_scales);
      }
      return;
    }
    for (std::int64_t head = 0; head < task_.kv_head_count; ++head) {
      Products::prepare_weights(task_.row_count, block.count, scores_of(head));
    }
    for (std::int64_t key = 0; key < block.count; key += kStreamedKeys) {
      const std::int64_t end = smaller(key + kStreamedKeys, block.count);
      for (std::int64_t head = 0; head < task_.kv_head_count; ++head) {
        stream.prefetch(end - key);
        Products::add_value_group(
            values_of(block, head, false, nothing), {key, end},
            {scratch_.carried + state_of(head, 0) * scratch_.value_dim, scratch_.value_dim});
      }
    }
  }

  StreamAhead::Part keys_part(const KeyRows& block) const {
    const auto size = static_cast<std::int64_t>(size_of(params_.k.dtype));
    return {block.k, block.count, params_.k.head_stride * size, params_.head_dim * size};
  }
  StreamAhead::Part values_part(const KeyRows& block) const {
    const auto size = static_cast<std::int64_t>(size_of(params_.v.dtype));
    return {block.v, block.count, params_.v.head_stride * size, params_.value_dim * size};
  }

  WeightedBlock<V> values_of(const KeyRows& block, std::int64_t head, bool masks,
                             const RowsAhead& ahead) const {
    return {.params = params_,
            .sequence = sequence_,
            .first_kv_head = task_.kv_head,
            .head = head,
            .keys = block,
            .rows = rows_.count,
            .weights = {scores_of(head), kKeyBlock},
            .masks = masks,
            .ahead = ahead,
            .staging = scratch_.staging,
            .out = {scratch_.out + state_of(head, 0) * scratch_.value_dim, scratch_.value_dim}};
  }

  const AttentionParams& params_;
  const ForwardTask& task_;
  const Sequence& sequence_;
  const bool streams_;
  const ForwardDecodeScratch<V> scratch_;
  const BlockScales<V> scales_;
  QueryRows rows_;
  std::int64_t chosen_head_ = -1;
  BlockRules<Scalar> rules_;
  Scalar query_factor_[kDecodeStates];
  Scalar maximum_[kDecodeStates];
  Scalar denominator_[kDecodeStates] = {};
};

template <class V, class Products>
void run_forward_decode(const AttentionParams& params, const ForwardTask& task, Scratch memory) {
  const bool as_stored = loads_stored<V>(params.k.dtype) && loads_stored<V>(params.v.dtype);
  ForwardTask part = task;
  part.kv_head_count = as_stored ? task.kv_head_count : 1;
  for (std::int64_t head = 0; head < task.kv_head_count; head += part.kv_head_count) {
    part.kv_head = task.kv_head + head;
    part.output = output_of(task.output, head);
    DecodeRows<V, Products> rows(params, part, memory);
    rows.attend();
    rows.finish();
  }
}

}  // namespace
}  // namespace ladon::cpu
