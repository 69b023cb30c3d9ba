// How the forward pass is cut into tasks. Every cut depends on a sequence's own lengths alone,
// never on the number of threads or on its batch mates: that is what makes results reproducible.
#pragma once

#include <cstdint>

#include "core/attention_params.h"
#include "core/integer.h"
#include "cpu/kernel_table.h"

namespace ladon {

// Keys of one split. A unit must be long enough to hide its merge (about one row of output a split)
// and short enough that one long sequence feeds many threads.
inline constexpr std::int64_t kSplitKeys = 512;

/// The tasks of one sequence: tiles of many rows over all their keys; or, where all rows fit one
/// tile (decoding), splits of the keys whose results are merged.
struct SequencePlan {
  std::int64_t rows = 0;   // of each KV head
  std::int64_t tiles = 0;  // of rows, each over all its keys
  bool few = false;        // rows go to forward_few
  std::int64_t first_split = 0;
  std::int64_t splits = 0;  // above 1: partial results
  std::int64_t units = 0;   // tasks of one KV head
};

inline SequencePlan plan_sequence(const AttentionParams& params, const Sequence& sequence,
                                  const cpu::KernelSet& kernels) {
  SequencePlan plan;
  plan.rows = sequence.query_len * params.group;
  if (plan.rows == 0) return plan;
  plan.tiles = ceil_div(plan.rows, kernels.tile_rows);
  plan.few = plan.rows <= kernels.few_rows;
  plan.splits = 1;
  plan.units = plan.tiles;
  if (plan.tiles > 1) return plan;
  // Only splits that the window reaches.
  const std::int64_t first_position = sequence.position_offset;
  const std::int64_t last_position = sequence.query_len - 1 + sequence.position_offset;
  const std::int64_t first = first_position - params.rules.window_left;
  const std::int64_t last = last_position + params.rules.window_right;
  const std::int64_t first_key = first < 0 ? 0 : first;
  const std::int64_t end_key = last + 1 < sequence.kv_len ? last + 1 : sequence.kv_len;
  if (first_key >= end_key) return plan;  // one task, which finds nothing and writes zeros
  plan.first_split = first_key / kSplitKeys;
  plan.splits = ceil_div(end_key, kSplitKeys) - plan.first_split;
  plan.units = plan.splits;
  return plan;
}

}  // namespace ladon
