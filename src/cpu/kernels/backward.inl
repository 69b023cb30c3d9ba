// Backward attention: dq, dk and dv for a block of keys against all rows of their KV head.
//
//   P  = exp(rules(scale * q k^T) - shift) * factor          dP = dout v^T
//   dS = P * (dP - delta),   delta = rowsum(dout * out) - dlse
//   dv = P^T dout,   dk = scale * dS^T q,   dq = scale * dS k
//
// Up to 256 keys keep their dk and dv sums in L2. Each tile of query rows is packed once for all of
// them (q and dout, both row by row and transposed) and is multiplied with 64 keys at a time. Lanes
// are queries in scores^T and dP^T, so shift (as a rule lse, see row_scales.inl), factor and delta
// are plain vectors. Rows are (token, head)
// pairs: the sum over the heads of a group happens inside the accumulators. dq is summed over keys,
// which several tasks share: each task adds to its own partial dq, and combine_dq sums those in a
// fixed order. Five products, 10 * head_dim flops per score, nothing computed twice. A tile's rows
// are prefetched while the previous tile is worked on: they are a token apart, and waiting for them
// was 3 % of the time.
//
// Keys whose tokens collide in L1 are staged once for a task, because dq reads them by columns: f32
// on Zen 5 7 % faster with AVX2, 5 % with AVX-512 (8 KV heads of 128).
//
// Measured on Zen 4: 79 to 84 % of FMA in f32, 71 to 76 % of bf16 products: sums over the 64 rows
// of a tile are short compared with the loads and stores of their results.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/backward_products.inl"

namespace ladon::cpu {
namespace {

template <class V>
struct BackwardScratch {
  using Scalar = typename V::Scalar;
  std::int64_t head_dim;   // padded to whole vectors
  std::int64_t value_dim;  // padded to whole vectors
  Scalar* scores;          // [kKeyBlock][width]: scores, then weights
  Scalar* dscores;         // [kKeyBlock][width]: dP, then dS
  Scalar* extra;           // [kKeyBlock][width]
  Scalar* keep;            // [kKeyBlock][width]
  Scalar* dk;              // [kBackwardKeys][head_dim]: sums since the last fold
  Scalar* dv;              // [kBackwardKeys][value_dim]
  Scalar* folded_dk;       // the same up to the last fold
  Scalar* folded_dv;
  Scalar* out;   // one row
  Scalar* dout;  // one row

  BackwardScratch(const AttentionParams& params, ScratchArena& arena) {
    constexpr std::int64_t kWidth = kTileRows<V>;
    head_dim = round_up(params.head_dim, V::kLanes);
    value_dim = round_up(params.value_dim, V::kLanes);
    scores = arena.take<Scalar>(kKeyBlock * kWidth);
    dscores = arena.take<Scalar>(kKeyBlock * kWidth);
    extra = arena.take<Scalar>(kKeyBlock * kWidth);
    keep = arena.take<Scalar>(kKeyBlock * kWidth);
    dk = arena.take<Scalar>(kBackwardKeys * head_dim);
    dv = arena.take<Scalar>(kBackwardKeys * value_dim);
    folded_dk = arena.take<Scalar>(kBackwardKeys * head_dim);
    folded_dv = arena.take<Scalar>(kBackwardKeys * value_dim);
    out = arena.take<Scalar>(params.value_dim);
    dout = arena.take<Scalar>(params.value_dim);
  }
};

/// A tile of query rows, prepared for any block of keys.
template <class Scalar>
struct BackwardTile {
  QueryRows rows;
  std::int64_t width = 0;
  alignas(64) Scalar shift[kMaxRows];
  alignas(64) Scalar factor[kMaxRows];
  bool has_factors = false;  // some factor is not 1
  alignas(64) Scalar delta[kMaxRows];
};

template <class V>
inline typename V::Scalar inner_product(const typename V::Scalar* a, const typename V::Scalar* b,
                                        std::int64_t n) {
  V sums = zero<V>();
  std::int64_t i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) sums = fma(load<V>(a + i), load<V>(b + i), sums);
  typename V::Scalar total = sum(sums);
  for (; i < n; ++i) total += a[i] * b[i];
  return total;
}

/// Sets all but the rows of a tile whose rows are set.
template <class V>
inline void set_tile(const AttentionParams& params, std::int64_t sequence_index,
                     const RowScales& scales, const BackwardScratch<V>& scratch,
                     BackwardTile<typename V::Scalar>& tile) {
  using Scalar = typename V::Scalar;
  const Sequence& sequence = params.sequences[sequence_index];
  const QueryRows& rows = tile.rows;
  const QueryOperand out{params.out, sequence.out, rows, params.value_dim};
  const QueryOperand dout{params.dout, sequence.dout, rows, params.value_dim};
  tile.width = round_up(rows.count, V::kLanes);
  tile.has_factors = false;
  for (std::int64_t r = 0; r < tile.width; ++r) {
    // Missing rows, and rows that see no key: exp(score - inf) makes all their weights 0.
    tile.shift[r] = MathConstants<Scalar>::kInfinity;
    tile.factor[r] = 1;
    tile.delta[r] = 0;
    if (r >= rows.count) continue;
    const std::int64_t row = scales.row(params, sequence_index, rows.token[r], rows.head[r]);
    tile.shift[r] = static_cast<const Scalar*>(scales.shift)[row];
    if (tile.shift[r] == MathConstants<Scalar>::kInfinity) continue;
    tile.factor[r] = static_cast<const Scalar*>(scales.factor)[row];
    tile.has_factors = tile.has_factors || tile.factor[r] != 1;
    load_row(at(params.out.data, params.out.dtype, out.start(r)), params.out.dtype,
             params.value_dim, scratch.out);
    load_row(at(params.dout.data, params.dout.dtype, dout.start(r)), params.dout.dtype,
             params.value_dim, scratch.dout);
    Scalar delta = inner_product<V>(scratch.out, scratch.dout, params.value_dim);
    if (params.dlse.data != nullptr) {
      delta -= static_cast<Scalar>(
          load_lse(params.dlse, sequence.dlse + rows.token[r] * params.dlse.token_stride +
                                    rows.head[r] * params.dlse.head_stride));
    }
    tile.delta[r] = delta;
  }
}

/// Converts q.k in scratch.scores to weights P (dropout applied), and dout.v in scratch.dscores to
/// gradients, for the keys of a span: gradients of the softcap's input with kToScore, else of the
/// biased score. Both are -0.0 where masked. Scores that are not kScaled are multiplied by the
/// scale first.
template <class V, bool kToScore, bool kScaled>
inline void score_gradients(const KeySpan& span, const BackwardScratch<V>& scratch,
                            const BackwardTile<typename V::Scalar>& tile,
                            BlockRules<typename V::Scalar>& block) {
  using Scalar = typename V::Scalar;
  using C = MathConstants<Scalar>;
  const std::int64_t width = tile.width;
  const std::int64_t count = span.count();
  set_block(block, span.params, span.sequence, tile.rows, {span.begin, span.end},
            RuleScratch<Scalar>{scratch.extra, scratch.keep, {.row_step = 1, .key_step = width}});
  const V scale = broadcast<V>(narrow<Scalar>(span.params.rules.scale));
  const bool plain = block.plain();
  const bool mark = block.masks();
  const V log2e = broadcast<V>(C::kLog2e);
  const V nothing = broadcast<V>(-C::kInfinity);
  const V masked = broadcast<V>(static_cast<Scalar>(-0.0));
  for (std::int64_t lane = 0; lane < width; lane += V::kLanes) {
    const V shift = load<V>(tile.shift + lane);
    const V factor = load<V>(tile.factor + lane);
    const V delta = load<V>(tile.delta + lane);
    const QueryLanes<V> query = load_lanes<V>(block, lane);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t index = i * width + lane;
      V score = load<V>(scratch.scores + index);
      if constexpr (!kScaled) score = score * scale;
      V cap_gradient = broadcast<V>(1);
      if (!plain) {
        const V key = broadcast<V>(static_cast<Scalar>(i));
        score = apply_rules<V, kToScore>(block, query, key, index, score, &cap_gradient);
      }
      V weight = exp2((score - shift) * log2e);
      if (tile.has_factors) weight = weight * factor;
      V dweight = load<V>(scratch.dscores + index);
      V kept = weight;
      if (block.keep != nullptr) {
        const V keep = load<V>(block.keep + index);
        kept = weight * keep;
        dweight = dweight * keep;
      }
      V dscore = weight * (dweight - delta);
      if (kToScore && block.softcap != 0) dscore = dscore * cap_gradient;
      if (mark) {
        const auto hidden = identical(score, nothing);
        kept = select(hidden, masked, kept);
        dscore = select(hidden, masked, dscore);
      }
      store(scratch.scores + index, kept);
      store(scratch.dscores + index, dscore);
    }
  }
}

/// Calls body(span) for each block of the keys that is visible to some row.
template <class Body>
inline void for_each_key_block(const KeySpan& keys, const QueryRows& rows, Body&& body) {
  for (std::int64_t begin = keys.begin; begin < keys.end; begin += kKeyBlock) {
    const std::int64_t end = smaller(begin + kKeyBlock, keys.end);
    if (rows.some_end <= begin || rows.some_first >= end) continue;
    body(KeySpan{keys.params, keys.sequence, keys.kv_head, begin, end, keys.end});
  }
}

// Tiles whose dk and dv are accumulated before they are folded into the total, as in the forward
// pass.
inline constexpr std::int64_t kFoldTiles = 64;

/// Adds sums to the folded ones and clears them.
template <class V>
inline void fold_sums(typename V::Scalar* from, std::int64_t count, typename V::Scalar* to) {
  for (std::int64_t i = 0; i < count; i += V::kLanes) {
    store(to + i, load<V>(to + i) + load<V>(from + i));
    store(from + i, zero<V>());
  }
}

/// Prefetches rows [begin, end) of q, out and dout.
inline void prefetch_query_rows(const AttentionParams& params, const Sequence& sequence,
                                std::int64_t kv_head, std::int64_t begin, std::int64_t end) {
  const auto prefetch = [](const Operand& operand, std::int64_t offset, std::int64_t token,
                           std::int64_t head, std::int64_t dim) {
    prefetch_row(operand, offset + token * operand.token_stride + head * operand.head_stride, dim);
  };
  for (std::int64_t row = begin; row < end; ++row) {
    const std::int64_t token = row / params.group;
    const std::int64_t head = kv_head * params.group + row % params.group;
    prefetch(params.q, sequence.q, token, head, params.head_dim);
    prefetch(params.out, sequence.out, token, head, params.value_dim);
    prefetch(params.dout, sequence.dout, token, head, params.value_dim);
  }
}

template <class V, class Products>
void run_backward(const AttentionParams& params, const BackwardTask& task, Scratch memory) {
  using Scalar = typename V::Scalar;
  ScratchArena arena(memory);
  const BackwardScratch<V> scratch(params, arena);
  Products products(params, arena);
  const Sequence& sequence = params.sequences[task.sequence];
  const std::int64_t key_count = task.key_end - task.key_begin;
  for (std::int64_t i = 0; i < key_count * scratch.head_dim; ++i) {
    scratch.dk[i] = 0;
    scratch.folded_dk[i] = 0;
  }
  for (std::int64_t i = 0; i < key_count * scratch.value_dim; ++i) {
    scratch.dv[i] = 0;
    scratch.folded_dv[i] = 0;
  }

  const KeySpan keys{params, sequence, task.kv_head, task.key_begin, task.key_end};
  products.load_keys(keys);
  BackwardTile<Scalar> tile;
  BlockRules<Scalar> block;
  const std::int64_t row_count = sequence.query_len * params.group;
  std::int64_t tiles = 0;
  for (std::int64_t row = 0; row < row_count; row += kTileRows<V>) {
    if (++tiles % kFoldTiles == 0) {
      fold_sums<V>(scratch.dk, key_count * scratch.head_dim, scratch.folded_dk);
      fold_sums<V>(scratch.dv, key_count * scratch.value_dim, scratch.folded_dv);
    }
    set_rows(tile.rows, params, sequence,
             {.first_head = task.kv_head * params.group,
              .heads_per_token = params.group,
              .begin = row,
              .count = smaller(kTileRows<V>, row_count - row)},
             {task.key_begin, task.key_end});
    if (tile.rows.some_end == 0) continue;
    set_tile(params, task.sequence, task.scales, scratch, tile);
    products.load_rows(params, sequence, tile.rows, tile.width);
    Scalar* dq = static_cast<Scalar*>(task.dq_partial) + row * params.head_dim;
    const BackwardScores<Scalar> scores{scratch.scores, scratch.dscores, tile.width};
    for_each_key_block(keys, tile.rows, [&](const KeySpan& span) {
      // Each key block prefetches its share of the next tile.
      const auto next = [&](std::int64_t key) {
        const std::int64_t share = kTileRows<V> * (key - task.key_begin);
        return smaller(row + kTileRows<V> + share / key_count, row_count);
      };
      prefetch_query_rows(params, sequence, task.kv_head, next(span.begin), next(span.end));
      products.score(span, scores);
      score_gradients<V, true, Products::kScaled>(span, scratch, tile, block);
      const std::int64_t at_key = span.begin - task.key_begin;
      products.add_gradients(span, block.masks(), tile.rows, scores,
                             {.dk = scratch.dk + at_key * scratch.head_dim,
                              .dv = scratch.dv + at_key * scratch.value_dim,
                              .dq = dq});
    });
  }

  fold_sums<V>(scratch.dk, key_count * scratch.head_dim, scratch.folded_dk);
  fold_sums<V>(scratch.dv, key_count * scratch.value_dim, scratch.folded_dv);
  for (std::int64_t i = 0; i < key_count; ++i) {
    const std::int64_t key = task.key_begin + i;
    if (params.dk.data != nullptr) {
      Scalar* dk = scratch.folded_dk + i * scratch.head_dim;
      if constexpr (!Products::kScaled) {  // else q was scaled, and dk is with it
        for (std::int64_t j = 0; j < params.head_dim; ++j) {
          dk[j] *= narrow<Scalar>(params.rules.scale);
        }
      }
      store_row(
          dk, params.head_dim,
          at(params.dk.data, params.dk.dtype,
             sequence.dk + key * params.dk.token_stride + task.kv_head * params.dk.head_stride),
          params.dk.dtype);
    }
    if (params.dv.data != nullptr) {
      store_row(
          scratch.folded_dv + i * scratch.value_dim, params.value_dim,
          at(params.dv.data, params.dv.dtype,
             sequence.dv + key * params.dv.token_stride + task.kv_head * params.dv.head_stride),
          params.dv.dtype);
    }
  }
}

template <class V, class Products>
std::size_t backward_bytes(const AttentionParams& params) {
  ScratchArena arena;
  const BackwardScratch<V> scratch(params, arena);
  const Products products(params, arena);
  return arena.used();
}

template <class V>
void backward(const AttentionParams& params, const BackwardTask& task, Scratch memory) {
  run_backward<V, ElementBackward<V>>(params, task, memory);
}

template <class V>
std::size_t backward_scratch(const AttentionParams& params) {
  return backward_bytes<V, ElementBackward<V>>(params);
}

template <class V>
struct CombineDqScratch {
  using Scalar = typename V::Scalar;
  std::int64_t head_dim;  // padded to whole vectors
  Scalar* sums;           // [head_dim][kLanes]
  Scalar* rows;           // [kLanes][head_dim]
  std::size_t bytes;

  CombineDqScratch(const AttentionParams& params, Scratch base) {
    ScratchArena arena(base);
    head_dim = round_up(params.head_dim, V::kLanes);
    sums = arena.take<Scalar>(head_dim * V::kLanes);
    rows = arena.take<Scalar>(head_dim * V::kLanes);
    bytes = arena.used();
  }
};

template <class V>
void combine_dq(const AttentionParams& params, const CombineDqTask& task, Scratch memory) {
  using Scalar = typename V::Scalar;
  const CombineDqScratch<V> scratch(params, memory);
  const Sequence& sequence = params.sequences[task.sequence];
  const std::int64_t row_begin = task.tile * kTileRows<V>;
  const std::int64_t rows = smaller(kTileRows<V>, sequence.query_len * params.group - row_begin);
  const std::int64_t width = round_up(rows, V::kLanes);
  // Null where there are no keys.
  const Scalar* partials = static_cast<const Scalar*>(task.partials);
  const V scale = broadcast<V>(narrow<Scalar>(params.rules.scale));
  for (std::int64_t first = 0; first < rows; first += V::kLanes) {
    for (std::int64_t i = 0; i < params.head_dim; ++i) {
      V sum = zero<V>();
      for (std::int64_t part = 0; part < task.partial_count; ++part) {
        sum = sum + load<V>(partials + part * task.partial_stride + row_begin * params.head_dim +
                            i * width + first);
      }
      store(scratch.sums + i * V::kLanes, sum * scale);
    }
    for (std::int64_t i = 0; i < scratch.head_dim; i += V::kLanes) {
      transpose_square<V>([&](int j) { return load<V>(scratch.sums + (i + j) * V::kLanes); },
                          V::kLanes, scratch.rows + i, scratch.head_dim);
    }
    for (std::int64_t r = first; r < smaller(first + V::kLanes, rows); ++r) {
      const std::int64_t token = (row_begin + r) / params.group;
      const std::int64_t head = task.kv_head * params.group + (row_begin + r) % params.group;
      store_row(scratch.rows + (r - first) * scratch.head_dim, params.head_dim,
                at(params.dq.data, params.dq.dtype,
                   sequence.dq + token * params.dq.token_stride + head * params.dq.head_stride),
                params.dq.dtype);
    }
  }
}

template <class V>
std::size_t combine_dq_scratch(const AttentionParams& params) {
  return CombineDqScratch<V>(params, {}).bytes;
}

}  // namespace
}  // namespace ladon::cpu
