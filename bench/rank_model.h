// What several ranks send each other, and how long that takes by the alpha-beta model: a message of
// n bytes takes latency + n / bandwidth, and a rank's messages leave one after the other. The
// arithmetic of `ladon plan --ranks`, and what `ladon bench --ranks` compares with.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ladon/context_parallel.h"

namespace ladon::bench {

struct Link {
  std::string name;
  double latency = 0;    // seconds
  double bandwidth = 0;  // bytes per second

  double seconds(double messages, double bytes) const {
    return messages * latency + bytes / bandwidth;
  }
};

/// Usual ones: as programs see them, not as they are sold.
std::span<const Link> known_links();

/// Sizes of a model's attention, as the formulas of docs/parallel.md name them.
struct RankSizes {
  double heads, kv_heads, head_dim, value_dim;
  double tokens, batch;  // of the prefill; sequences
  double ranks, element;
};

// Bytes that a rank sends for one layer, without a mask.
/// Tensor parallel, for so many rows: attended values are gathered, then outputs.
double sent_by_heads(const RankSizes& sizes, double rows, double embed_dim);
/// Context parallel, by gathered keys or a ring.
double sent_by_gather(const RankSizes& sizes);
/// Ulysses: to heads and back.
double sent_by_exchange(const RankSizes& sizes);
/// Partial results in f32 with an f64 lse, then what was merged. `width` is that of a head's sum.
double sent_by_sequence(const RankSizes& sizes, double width);
/// A tensor-parallel layer over spread latents: absorbed queries, partial sums, and what
/// sent_by_heads() counts.
double sent_by_latents(const RankSizes& sizes, double kv_rank, double rope_dim, double embed_dim);

/// Rounds of messages by which ranks agree on a call and on its end.
inline constexpr double kAgreementRounds = 2;

/// What a rank of a ring merges over one causal sequence, the rank with the most: partial results
/// of one part of the sequence (docs/parallel.md) each.
struct RingMerges {
  double merges = 0;
  double parts = 0;  // that they read
};
RingMerges ring_merges(int ranks);

/// One step of a call: what is computed, and what is in flight meanwhile, in seconds.
struct RankStep {
  double compute = 0;
  double communication = 0;
};

/// Each step takes as long as the longer of the two.
double seconds_of(std::span<const RankStep> steps);

/// The steps of a context-parallel call. `compute` is a rank's, `inputs` and `results` what it
/// sends before and after computing, in seconds; kAllGather and kUlysses have `stages`, of which
/// each has its share of them, and kRing one step for each rank.
std::vector<RankStep> steps_of(ContextScheme scheme, bool backward, int ranks, int stages,
                               double compute, double inputs, double results);

}  // namespace ladon::bench
