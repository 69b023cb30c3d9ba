// How the forward pass is divided into tasks. Every division that can change a bit (tiles of rows,
// splits of keys) depends on a sequence's own lengths alone, never on the number of threads or on
// the other sequences of the batch: results are reproducible. What one task combines (row strips,
// which are a few tiles that share each key block; KV heads) may depend on anything.
#pragma once

#include <cstdint>

#include "core/attention_params.h"
#include "core/integer.h"
#include "cpu/cache_sizes.h"
#include "cpu/kernel_table.h"

namespace ladon::cpu {

// Keys of one split: long enough to hide the cost of its merge (about one row of output per split)
// and short enough that one long sequence occupies many threads.
inline constexpr std::int64_t kSplitKeys = 512;

/// The tasks of one sequence: tiles of rows over all their keys; or, where all rows fit one tile
/// (decoding), splits of the keys whose results are merged. Where the call is a part of a larger
/// problem, "all rows" are those of the whole.
struct SequencePlan {
  std::int64_t rows = 0;   // of each KV head
  std::int64_t tiles = 0;  // of rows, each over all its keys
  bool decodes = false;    // rows go to forward_decode
  std::int64_t first_split = 0;
  std::int64_t splits = 0;  // above 1: partial results
  std::int64_t units = 0;   // tiles or splits of one KV head
};

/// With `chunk_invariant`, every row is computed as in a call over the whole sequence: by tiles,
/// and over all its keys at once.
inline SequencePlan plan_sequence(const AttentionParams& params, const Sequence& sequence,
                                  const KernelSet& kernels, bool chunk_invariant) {
  SequencePlan plan;
  plan.rows = sequence.query_len * params.group;
  if (plan.rows == 0) return plan;
  const WholeProblem& whole = params.whole;
  const std::int64_t whole_len = whole.query_len > 0 ? whole.query_len : sequence.query_len;
  const std::int64_t whole_rows = whole_len * (whole.group > 0 ? whole.group : params.group);
  plan.tiles = ceil_div(plan.rows, kernels.tile_rows);
  plan.decodes = whole_rows <= kernels.decode_rows && !chunk_invariant;
  plan.splits = 1;
  plan.units = plan.tiles;
  if (whole_rows > kernels.tile_rows || chunk_invariant) return plan;
  // Only splits with keys inside the window.
  const std::int64_t first_position = sequence.position_offset - whole.first_query;
  const std::int64_t last_position = first_position + whole_len - 1;
  const std::int64_t first = first_position - params.rules.window_left;
  const std::int64_t last = last_position + params.rules.window_right;
  const std::int64_t first_key = first < 0 ? 0 : first;
  const std::int64_t end_key = last + 1 < sequence.kv_len ? last + 1 : sequence.kv_len;
  if (first_key >= end_key) return plan;  // one task, which sees no key and writes zeros
  plan.first_split = first_key / kSplitKeys;
  plan.splits = ceil_div(end_key, kSplitKeys) - plan.first_split;
  plan.units = plan.splits;
  return plan;
}

/// Most KV heads of a decoding task. Heads are independent, so this may depend on anything without
/// changing a bit.
///
/// Where the heads of a token are contiguous, whole tokens in order are read fastest: 8 of 32 KV
/// heads at a time gave 24 GB/s, all 32 gave 28, of the 36 of the memory read. A block of 64 tokens
/// is prefetched while the one before it is worked on, half K and half V, so it must stay in L2.
/// Streamed tokens need not.
/// Where the tokens of a head are contiguous, one head is read in order, and several would compete
/// for the sets of the caches: they are a power of two apart.
inline std::int64_t most_heads_at_once(const AttentionParams& params, const SequencePlan& plan,
                                       const KernelSet& kernels) {
  if (!plan.decodes || params.k.token_stride < params.k.head_stride) return 1;
  constexpr std::int64_t kBlockTokens = 64;
  const std::int64_t bytes = params.head_dim * static_cast<std::int64_t>(size_of(params.k.dtype)) +
                             params.value_dim * static_cast<std::int64_t>(size_of(params.v.dtype));
  std::int64_t heads = streams_tokens(params, params.num_kv_heads)
                           ? params.num_kv_heads
                           : cache_sizes().l2 / (kBlockTokens * bytes);
  if (heads > kernels.decode_states / plan.rows) heads = kernels.decode_states / plan.rows;
  if (heads > params.num_kv_heads) heads = params.num_kv_heads;
  return heads < 1 ? 1 : heads;
}

// Most sequences of a group. With more, the splits of a short prefix would occupy too few threads;
// and one read of the prefix for 16 sequences is already little compared with the reads of their
// own keys.
inline constexpr std::int64_t kMostShared = 16;

/// The number of leading splits that two sequences have in the same pages.
inline std::int64_t common_splits(const AttentionParams& params, const Sequence& a,
                                  const Sequence& b) {
  const std::int64_t page_size = params.kv_layout.page_size;
  if (page_size == 0) return 0;
  const std::int64_t pages = (a.kv_len < b.kv_len ? a.kv_len : b.kv_len) / page_size;
  std::int64_t common = 0;
  while (common < pages && a.pages[common] == b.pages[common]) ++common;
  return common * page_size / kSplitKeys;
}

/// Consecutive sequences of the batch that share a prefix. Their tasks over the prefix run one
/// after the other, split by split, so that each split is read from memory once and then from the
/// cache of one core. Every bit is as it would be for each sequence alone.
struct PrefixGroup {
  std::int64_t sequences = 1;
  std::int64_t splits = 0;
};

/// The group of sequences from `first` on. `plans` has one entry per sequence.
inline PrefixGroup prefix_group(const AttentionParams& params, const SequencePlan* plans,
                                std::int64_t first) {
  const auto splits_of = [&](std::int64_t s) {
    return plans[s].splits > 1 && plans[s].first_split == 0 ? plans[s].splits : 0;
  };
  PrefixGroup group{.splits = splits_of(first)};
  if (group.splits == 0 || params.kv_layout.page_size == 0) return {};
  for (std::int64_t s = first + 1; s < params.num_sequences && s < first + kMostShared; ++s) {
    std::int64_t common = common_splits(params, params.sequences[first], params.sequences[s]);
    common = common < splits_of(s) ? common : splits_of(s);
    // A sequence that shares much less would shorten the common prefix of the others.
    if (common == 0 || (group.sequences > 1 && common < group.splits / 2)) break;
    group.splits = common < group.splits ? common : group.splits;
    ++group.sequences;
  }
  if (group.sequences == 1) group.splits = 0;
  return group;
}

}  // namespace ladon::cpu
