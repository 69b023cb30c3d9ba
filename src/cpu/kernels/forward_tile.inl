// Forward attention for many query rows, one row strip per task. A row strip is a few tiles of
// query rows that share each block of keys and values.
//
//   out = softmax(rules(scale * q k^T)) v,   lse = log of the softmax's denominator
//
// Lanes are queries. A tile of up to 4 vectors of rows (64 on AVX-512 f32) keeps q^T and out^T in
// L1/L2; keys come in blocks of 64 and scores^T [key][row] are overwritten by the weights:
//   scores^T = K * q^T      K read in place, one scalar broadcast at a time
//   softmax                 per lane, no horizontal step
//   out^T   += V^T * weights^T
// The running maximum of a lane moves only when it grows by more than 8 (in log2), so that out^T is
// rarely rescaled. The decision is made lane by lane, so a row's bits do not depend on its
// neighbours.
//
// Cost: 4 * head_dim flops per score at the FMA rate. K and V are read once per strip, 8 * head_dim
// bytes for 256 rows, far below any bandwidth. (With one tile at a time they came from L3 4 times
// as often: 69 % of FMA instead of 83 at 2048 keys of 128.) Each block is prefetched while the
// previous one is worked on, a few rows at a time.
//
// Measured on Zen 4: 80 to 86 % of FMA in f32, 75 to 80 % of bf16 products; 94 % of the time is in
// the products, 6 % in the softmax. MQA decoding of 32 rows: 60 % of bf16 products, 25 % of the
// time in the softmax, in pairing V and in prefetching. With AVX2, f32, head_dim 128: 83 % in the
// products, 6 % in the softmax, 11 % in the rest, half of which waits in prefetch instructions.
//
// In 16 registers V is staged where its tokens collide in L1 (tile_products.inl): f32, head_dim
// 128, 8 KV heads on Zen 5 with AVX2 72 to 85 % of FMA, causal 70 to 82 %, f64 68 to 79 %. (On Zen
// 4 the same copy gave 1 %.)
//
// Tried and lost: that copy with AVX-512 (1 % at head_dim 128, -2 to -3 % at 64); folding log2(e)
// into q, which saves one multiply per score vector (under 1 % at head_dim 128) and overflows for
// scores near the largest float (masks of -3.4e38 are common).
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/convert.inl"
#include "cpu/kernels/score_rules.inl"
#include "cpu/kernels/softmax.inl"
#include "cpu/kernels/tile_products.inl"

namespace ladon::cpu {
namespace {

// Key blocks whose sums are accumulated before they are folded into the total: with 4096 keys to a
// fold, no chain of additions grows long, however many keys there are. Folds are at fixed keys, so
// that a row's bits do not depend on where the other rows of its tile begin.
inline constexpr std::int64_t kFoldBlocks = 64;

// Products may write up to a multiple of this many rows of out^T.
inline constexpr std::int64_t kValueUnit = 16;

/// Multiplies rows, [count][width], by one factor per lane.
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

/// One tile of a row strip: its rows, their running softmax, and their sums.
template <class V>
struct ForwardTile {
  using Scalar = typename V::Scalar;
  QueryRows rows;
  std::int64_t width = 0;  // rows, padded to whole vectors
  bool summed = false;     // `out` has sums since the last fold
  bool has_folded = false;
  Scalar* out = nullptr;     // [value_dim][width]: sums since the last fold
  Scalar* folded = nullptr;  // [value_dim][width]: sums up to the last fold
  alignas(64) Scalar maximum[kMaxRows];
  alignas(64) Scalar denominator[kMaxRows] = {};
  alignas(64) Scalar folded_denominator[kMaxRows] = {};

  ForwardTile() {
    for (Scalar& value : maximum) value = MathConstants<Scalar>::kLowest;
  }

  bool sees(const KeySpan& span) const {
    return rows.some_first < span.end && rows.some_end > span.begin;
  }

  /// Whether every row sees every key.
  bool sees_all(const KeySpan& span) const {
    return rows.all_first <= span.begin && rows.all_end >= span.end;
  }

  bool empty() const { return !summed && !has_folded; }

  /// Multiplies the earlier sums by the factors by which the maxima moved.
  void rescale(std::int64_t value_dim, const Scalar* factors) {
    if (summed) rescale_rows<V>(out, value_dim, width, factors);
    if (!has_folded) return;
    rescale_rows<V>(folded, value_dim, width, factors);
    rescale_rows<V>(folded_denominator, 1, width, factors);
  }

  /// Adds the sums since the last fold to the folded ones.
  void fold(std::int64_t value_dim) {
    fold_rows<V>(out, value_dim, width, !has_folded, folded);
    fold_rows<V>(denominator, 1, width, !has_folded, folded_denominator);
    for (Scalar& value : denominator) value = 0;
    summed = false;
    has_folded = true;
  }

  /// The sums over all blocks; afterwards the denominators are over all blocks too.
  const Scalar* total(std::int64_t value_dim) {
    if (!has_folded) return out;
    if (summed) fold(value_dim);
    for (std::int64_t r = 0; r < width; ++r) denominator[r] = folded_denominator[r];
    return folded;
  }
};

/// The row strip of one task: its tiles, and the buffers that they share.
template <class V, class Products>
class ForwardStrip {
 public:
  using Scalar = typename V::Scalar;

  ForwardStrip(const AttentionParams& params, ScratchArena& arena)
      : params_(params),
        value_dim_(round_up(params.value_dim, kValueUnit)),
        most_tiles_(tiles_at_once(params, kTileRows<V>, sizeof(Scalar))),
        sums_(arena.take<Scalar>(2 * most_tiles_ * value_dim_ * kTileRows<V>)),
        scores_(arena.take<Scalar>(kKeyBlock * kTileRows<V>)),
        extra_(arena.take<Scalar>(kKeyBlock * kTileRows<V>)),
        keep_(arena.take<Scalar>(kKeyBlock * kTileRows<V>)),
        row_scratch_(arena.take<Scalar>(
            V::kLanes * round_up(larger(params.head_dim, params.value_dim), kValueUnit))),
        products_(params, most_tiles_, arena) {}

  void run(const ForwardTask& task) {
    set_tiles(task);
    // Key blocks begin at fixed positions, so that a tile's bits do not depend on its strip.
    const std::int64_t skipped = (first_key_ - task.key_begin) / kKeyBlock;
    const auto span_from = [&](std::int64_t begin) {
      return KeySpan{params_, params_.sequences[task.sequence],     task.kv_head,
                     begin,   smaller(begin + kKeyBlock, end_key_), end_key_};
    };
    const std::int64_t first = task.key_begin + skipped * kKeyBlock;
    if (first < end_key_) prefetch_kv(span_from(first));
    for (std::int64_t tile = 0; tile < tiles_; ++tile) {
      products_.load_queries(params_, params_.sequences[task.sequence], tile, tile_[tile].rows,
                             tile_[tile].width, row_scratch_);
    }
    for (std::int64_t begin = first; begin < end_key_; begin += kKeyBlock) attend(span_from(begin));
    for (std::int64_t tile = 0; tile < tiles_; ++tile) finish(task, tile_[tile]);
  }

 private:
  void set_tiles(const ForwardTask& task) {
    const Sequence& sequence = params_.sequences[task.sequence];
    first_key_ = task.key_end;
    end_key_ = task.key_begin;
    tiles_ = (task.row_count + kTileRows<V> - 1) / kTileRows<V>;
    for (std::int64_t t = 0; t < tiles_; ++t) {
      ForwardTile<V>& tile = tile_[t];
      const std::int64_t row = t * kTileRows<V>;
      set_rows(tile.rows, params_, sequence,
               {.first_head = task.kv_head * params_.group,
                .heads_per_token = params_.group,
                .begin = task.row_begin + row,
                .count = smaller(kTileRows<V>, task.row_count - row)},
               {task.key_begin, task.key_end});
      // Rounded up to whole pairs of keys, because in a strip that sees more keys the last key of
      // an odd count is paired with the next: a tile's bits must not depend on its strip.
      if (tile.rows.some_end > 0) {
        const std::int64_t seen = round_up(tile.rows.some_end - task.key_begin, 2);
        tile.rows.some_end = smaller(task.key_begin + seen, task.key_end);
      }
      tile.width = round_up(tile.rows.count, V::kLanes);
      tile.out = sums_ + 2 * t * value_dim_ * kTileRows<V>;
      tile.folded = tile.out + value_dim_ * kTileRows<V>;
      first_key_ = smaller(first_key_, tile.rows.some_first);
      end_key_ = larger(end_key_, tile.rows.some_end);
    }
  }

  /// One block of keys, for all tiles that see some of it.
  void attend(const KeySpan& span) {
    std::int64_t sharing = 0;
    bool masks = params_.rules.mask.data != nullptr || params_.rules.bias.data != nullptr;
    for (std::int64_t t = 0; t < tiles_; ++t) {
      if (!tile_[t].sees(span)) continue;
      ++sharing;
      masks = masks || !tile_[t].sees_all(span);
    }
    if (sharing == 0) return;
    products_.load_block(span, masks);
    std::int64_t index = 0;
    for (std::int64_t t = 0; t < tiles_; ++t) {
      if (tile_[t].sees(span)) attend(span, t, {index++, sharing});
    }
  }

  void attend(const KeySpan& span, std::int64_t t, PrefetchShare share) {
    ForwardTile<V>& tile = tile_[t];
    const std::int64_t count = smaller(span.end, tile.rows.some_end) - span.begin;
    const ScoreTile<Scalar> scores{scores_, count, tile.width};
    alignas(64) Scalar rescale[kMaxRows];
    products_.score(span, share, t, scores);
    set_block(block_, params_, span.sequence, tile.rows, {span.begin, span.begin + count},
              RuleScratch<Scalar>{extra_, keep_, {.row_step = 1, .key_step = tile.width}});
    const bool moved =
        softmax_block<V, Products::kScaled>(block_, narrow<Scalar>(params_.rules.scale), scores,
                                            {tile.maximum, tile.denominator}, rescale);
    if (moved) tile.rescale(params_.value_dim, rescale);
    products_.add_values(span, share, block_.masks(), {scores_, count, tile.width},
                         {.data = tile.out, .stride = tile.width, .accumulate = tile.summed});
    tile.summed = true;
    if ((span.begin / kKeyBlock + 1) % kFoldBlocks == 0) tile.fold(params_.value_dim);
  }

  void finish(const ForwardTask& task, ForwardTile<V>& tile) {
    const QueryRows& rows = tile.rows;
    const Scalar* sums = tile.total(params_.value_dim);
    for (std::int64_t first = 0; first < rows.count; first += V::kLanes) {
      for (std::int64_t i = 0; i < value_dim_ && !tile.empty(); i += V::kLanes) {
        transpose_square<V>(
            [&](int lane) { return load<V>(sums + (i + lane) * tile.width + first); }, V::kLanes,
            row_scratch_ + i, value_dim_);
      }
      for (std::int64_t r = first; r < smaller(first + V::kLanes, rows.count); ++r) {
        const RowFinish end =
            finish_row(params_, task.output, rows.head[r], tile.maximum[r], tile.denominator[r]);
        const Scalar factor = static_cast<Scalar>(end.factor);
        const bool empty = tile.empty() || tile.denominator[r] == 0;
        Scalar* row = row_scratch_ + (r - first) * value_dim_;
        for (std::int64_t i = 0; i < params_.value_dim; ++i) {
          row[i] = empty ? Scalar{0} : row[i] * factor;
        }
        write_row(task.output, rows.token[r], rows.head[r] % params_.group, params_.value_dim, row,
                  end.lse);
      }
    }
  }

  const AttentionParams& params_;
  std::int64_t value_dim_;  // padded
  std::int64_t most_tiles_;
  Scalar* sums_;         // of all tiles
  Scalar* scores_;       // [kKeyBlock][width]
  Scalar* extra_;        // [kKeyBlock][width]
  Scalar* keep_;         // [kKeyBlock][width]
  Scalar* row_scratch_;  // [kLanes][dim]: rows of q or out
  Products products_;
  std::int64_t tiles_ = 0;
  std::int64_t first_key_ = 0;  // of the keys that some tile sees
  std::int64_t end_key_ = 0;
  BlockRules<Scalar> block_;
  ForwardTile<V> tile_[kMostTiles];
};

template <class V, class Products>
void run_forward_tile(const AttentionParams& params, const ForwardTask& task, Scratch memory) {
  ScratchArena arena(memory);
  ForwardStrip<V, Products>(params, arena).run(task);
}

template <class V, class Products>
std::size_t forward_tile_bytes(const AttentionParams& params) {
  ScratchArena arena;
  const ForwardStrip<V, Products> strip(params, arena);
  return arena.used();
}

template <class V>
void forward_tile(const AttentionParams& params, const ForwardTask& task, Scratch memory) {
  run_forward_tile<V, ElementProducts<V>>(params, task, memory);
}

template <class V>
std::size_t forward_tile_scratch(const AttentionParams& params) {
  return forward_tile_bytes<V, ElementProducts<V>>(params);
}

}  // namespace
}  // namespace ladon::cpu
