// Forward attention for a tile of many query rows.
//
//   out = softmax(rules(scale * q k^T)) v,   lse = log of the softmax's denominator
//
// Lanes are queries. A tile of up to 4 vectors of rows (64 on AVX-512 f32) keeps q^T and out^T in
// L1/L2; keys come in blocks of 64 and scores^T [key][row] are overwritten by the weights:
//   scores^T = K * q^T      K read as it lies, one scalar broadcast at a time
//   softmax                 per lane, no horizontal step
//   out^T   += V^T * weights^T
// The running maximum of a lane moves only when it grows by more than 8 (in log2), so that out^T is
// rarely rescaled; the choice is made lane by lane, so a row's bits do not depend on its
// neighbours. Two numbers per tile and key: 4 * head_dim flops a score at the FMA rate; K and V are
// read once per tile, 8 * head_dim bytes for 64 rows, far below any bandwidth.
// Tried and lost: folding log2(e) into q saves one multiply per score vector (under 1 % at
// head_dim 128) and overflows for scores near the largest float (masks of -3.4e38 are common).
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/convert.inl"
#include "cpu/kernels/score_rules.inl"
#include "cpu/kernels/tile_products.inl"

namespace ladon::cpu {
namespace {

// Growth of the maximum, in natural log, that makes a lane rescale: 8 * ln 2. Weights stay below
// 2^8, so sums over any key count that fits memory are far from overflow.
template <class V>
constexpr typename V::Scalar kRescaleGrowth = static_cast<typename V::Scalar>(5.545177444479562);

// Blocks whose sums are added up one after the other before they are folded into the rest: with
// 4096 keys to a fold, no chain of additions grows long, however many keys there are.
inline constexpr std::int64_t kFoldBlocks = 64;

// Products may write whole multiples of this many rows of out.
inline constexpr std::int64_t kValueUnit = 16;

template <class V>
struct ForwardTileScratch {
  using Scalar = typename V::Scalar;
  Scalar* out;     // [value_dim][width]: sums over the last few blocks
  Scalar* folded;  // [value_dim][width]: sums over the blocks before
  Scalar* scores;  // [kKeyBlock][width]
  Scalar* extra;   // [kKeyBlock][width]
  Scalar* keep;    // [kKeyBlock][width]
  Scalar* row;     // one row in or out

  ForwardTileScratch(const AttentionParams& params, ScratchArena& arena) {
    const std::int64_t width = kTileRows<V>;
    out = arena.take<Scalar>(round_up(params.value_dim, kValueUnit) * width);
    folded = arena.take<Scalar>(params.value_dim * width);
    scores = arena.take<Scalar>(kKeyBlock * width);
    extra = arena.take<Scalar>(kKeyBlock * width);
    keep = arena.take<Scalar>(kKeyBlock * width);
    row = arena.take<Scalar>(larger(params.head_dim, params.value_dim));
  }
};

/// Scores of one block to weights, lane by lane. Returns whether any lane's maximum moved; then
/// `rescale` holds the factors for what was summed before. Scores that are not kScaled are
/// multiplied by `scale` first.
template <class V, bool kScaled>
inline bool softmax_block(const BlockRules<typename V::Scalar>& block, std::int64_t width,
                          std::int64_t key_count, typename V::Scalar scale,
                          typename V::Scalar* scores, typename V::Scalar* maximum,
                          typename V::Scalar* denominator, typename V::Scalar* rescale) {
  using C = MathConstants<typename V::Scalar>;
  const V log2e = broadcast<V>(C::kLog2e);
  const V nothing = broadcast<V>(-C::kInfinity);
  const bool plain = block.plain();
  const auto scaled = [scale](V score) {
    if constexpr (kScaled) return score;
    return score * broadcast<V>(scale);
  };
  bool moved = false;
  for (std::int64_t lane = 0; lane < width; lane += V::kLanes) {
    typename V::Scalar* column = scores + lane;
    V block_maximum = nothing;
    if (plain) {
      for (std::int64_t i = 0; i < key_count; ++i) {
        const V score = scaled(load<V>(column + i * width));
        if constexpr (!kScaled) store(column + i * width, score);
        block_maximum = max(score, block_maximum);
      }
    } else {
      const V first = load<V>(block.first + lane);
      const V last = load<V>(block.last + lane);
      const V position = load<V>(block.position + lane);
      const V slope = load<V>(block.slope + lane);
      for (std::int64_t i = 0; i < key_count; ++i) {
        const V key = broadcast<V>(static_cast<typename V::Scalar>(i));
        const V score =
            apply_rules<V, false>(block, scaled(load<V>(column + i * width)), key, first, last,
                                  position, slope, i * width + lane, nullptr);
        store(column + i * width, score);
        block_maximum = max(score, block_maximum);
      }
    }
    const V old_maximum = load<V>(maximum + lane);
    const auto grew = less(old_maximum + broadcast<V>(kRescaleGrowth<V>), block_maximum);
    const V new_maximum = select(grew, block_maximum, old_maximum);
    const V factor = exp2((old_maximum - new_maximum) * log2e);
    moved = moved || any<V>(grew);
    store(maximum + lane, new_maximum);
    store(rescale + lane, factor);
    V sum_even = zero<V>();
    V sum_odd = zero<V>();
    const V masked = broadcast<V>(static_cast<typename V::Scalar>(-0.0));
    const bool mark = block.masks();
    for (std::int64_t i = 0; i < key_count; ++i) {
      const V score = load<V>(column + i * width);
      V weight = exp2((score - new_maximum) * log2e);
      if (i % 2 == 0) {
        sum_even = sum_even + weight;
      } else {
        sum_odd = sum_odd + weight;
      }
      if (block.keep != nullptr) weight = weight * load<V>(block.keep + i * width + lane);
      if (mark) weight = select(identical(score, nothing), masked, weight);
      store(column + i * width, weight);
    }
    store(denominator + lane, fma(load<V>(denominator + lane), factor, sum_even + sum_odd));
  }
  return moved;
}

/// Rows of [count][width] times one factor for each lane.
template <class V>
inline void rescale_rows(typename V::Scalar* rows, std::int64_t count, std::int64_t width,
                         const typename V::Scalar* factors) {
  for (std::int64_t i = 0; i < count; ++i) {
    for (std::int64_t lane = 0; lane < width; lane += V::kLanes) {
      typename V::Scalar* at_lane = rows + i * width + lane;
      store(at_lane, load<V>(at_lane) * load<V>(factors + lane));
    }
  }
}

/// to = from, or to += from.
template <class V>
inline void fold_rows(const typename V::Scalar* from, std::int64_t count, std::int64_t width,
                      bool first, typename V::Scalar* to) {
  for (std::int64_t i = 0; i < count * width; i += V::kLanes) {
    const V sums = load<V>(from + i);
    store(to + i, first ? sums : load<V>(to + i) + sums);
  }
}

/// What turns a row's sums into its output: the factor of the sums, and the row's lse.
struct RowFinish {
  double factor;
  double lse;
};

template <class Scalar>
inline RowFinish finish_row(const AttentionParams& params, const ForwardOutput& output,
                            std::int64_t head, Scalar row_maximum, Scalar row_denominator) {
  if (row_denominator == 0) return {0, -__builtin_inf()};  // saw nothing
  double maximum = static_cast<double>(row_maximum);
  double denominator = static_cast<double>(row_denominator);
  double factor = 1;
  if (params.rules.sinks != nullptr && output.add_sinks) {
    const double sink = params.rules.sinks[head];
    const double top = maximum < sink ? sink : maximum;
    factor = __builtin_exp(maximum - top);
    denominator = denominator * factor + __builtin_exp(sink - top);
    maximum = top;
  }
  return {factor / denominator, maximum + __builtin_log(denominator)};
}

/// One finished row to where it belongs; `head` counts from the group's first.
template <class Scalar>
inline void write_row(const ForwardOutput& output, std::int64_t token, std::int64_t head,
                      std::int64_t value_dim, const Scalar* row, double lse) {
  store_row(row, value_dim,
            at(output.data, output.dtype, token * output.token_stride + head * output.head_stride),
            output.dtype);
  if (output.lse.data != nullptr) {
    store_lse(output.lse, token * output.lse.token_stride + head * output.lse.head_stride, lse);
  }
}

template <class V, class Products>
void run_forward_tile(const AttentionParams& params, const ForwardTask& task, void* memory) {
  using Scalar = typename V::Scalar;
  ScratchArena arena(memory);
  const ForwardTileScratch<V> scratch(params, arena);
  Products products(params, arena);
  const Sequence& sequence = params.sequences[task.sequence];
  const std::int64_t value_dim = params.value_dim;
  const std::int64_t first_head = task.kv_head * params.group;
  Rows<Scalar> rows;
  set_rows(rows, params, sequence, first_head, params.group, task.row_begin, task.row_count,
           task.key_begin, task.key_end);
  const std::int64_t width = round_up(rows.count, V::kLanes);

  products.load_queries(params, sequence, rows, width, scratch.row);
  alignas(64) Scalar maximum[kMaxRows];
  alignas(64) Scalar denominator[kMaxRows] = {};
  alignas(64) Scalar folded_denominator[kMaxRows] = {};
  alignas(64) Scalar rescale[kMaxRows];
  for (Scalar& value : maximum) value = MathConstants<Scalar>::kLowest;

  BlockRules<Scalar> block;
  std::int64_t blocks = 0;  // done so far
  for (std::int64_t begin = rows.some_first; begin < rows.some_end; begin += kKeyBlock) {
    const KeySpan span{
        params,       sequence, task.kv_head, begin, smaller(begin + kKeyBlock, rows.some_end),
        rows.some_end};
    const std::int64_t count = span.count();
    products.score(span, width, scratch.scores);
    set_block(block, params, sequence, rows, begin, count, scratch.extra, scratch.keep, 1, width);
    const bool moved =
        softmax_block<V, Products::kScaled>(block, width, count, narrow<Scalar>(params.rules.scale),
                                            scratch.scores, maximum, denominator, rescale);
    if (moved && blocks > 0) {
      if (blocks % kFoldBlocks != 0) rescale_rows<V>(scratch.out, value_dim, width, rescale);
      if (blocks >= kFoldBlocks) {
        rescale_rows<V>(scratch.folded, value_dim, width, rescale);
        rescale_rows<V>(folded_denominator, 1, width, rescale);
      }
    }
    products.add_values(span, block.masks(), width, scratch.scores, scratch.out,
                        blocks % kFoldBlocks != 0);
    ++blocks;
    if (blocks % kFoldBlocks == 0) {
      const bool first_fold = blocks == kFoldBlocks;
      fold_rows<V>(scratch.out, value_dim, width, first_fold, scratch.folded);
      fold_rows<V>(denominator, 1, width, first_fold, folded_denominator);
      for (Scalar& value : denominator) value = 0;
    }
  }
  // What was summed since the last fold joins the rest.
  const Scalar* sums = scratch.out;
  if (blocks >= kFoldBlocks) {
    if (blocks % kFoldBlocks != 0) {
      fold_rows<V>(scratch.out, value_dim, width, false, scratch.folded);
      fold_rows<V>(denominator, 1, width, false, folded_denominator);
    }
    sums = scratch.folded;
    for (std::int64_t r = 0; r < width; ++r) denominator[r] = folded_denominator[r];
  }

  for (std::int64_t r = 0; r < rows.count; ++r) {
    const RowFinish finish =
        finish_row(params, task.output, rows.head[r], maximum[r], denominator[r]);
    const Scalar factor = static_cast<Scalar>(finish.factor);
    const bool empty = blocks == 0 || denominator[r] == 0;
    for (std::int64_t i = 0; i < value_dim; ++i) {
      scratch.row[i] = empty ? Scalar{0} : sums[i * width + r] * factor;
    }
    write_row(task.output, rows.token[r], rows.head[r] - first_head, value_dim, scratch.row,
              finish.lse);
  }
}

template <class V, class Products>
std::size_t forward_tile_bytes(const AttentionParams& params) {
  ScratchArena arena(nullptr);
  const ForwardTileScratch<V> scratch(params, arena);
  const Products products(params, arena);
  return arena.used();
}

template <class V>
void forward_tile(const AttentionParams& params, const ForwardTask& task, void* memory) {
  run_forward_tile<V, WideProducts<V>>(params, task, memory);
}

template <class V>
std::size_t forward_tile_scratch(const AttentionParams& params) {
  return forward_tile_bytes<V, WideProducts<V>>(params);
}

}  // namespace
}  // namespace ladon::cpu
