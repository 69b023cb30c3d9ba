#include "rank_model.h"

#include <algorithm>
#include <array>

#include "parallel/context_schemes.h"

namespace ladon::bench {
namespace {

double shared_kv_heads(const RankSizes& s) { return std::max(1.0, s.kv_heads / s.ranks); }

}  // namespace

std::span<const Link> known_links() {
  static const std::array<Link, 6> all = {{{"memory", 0.3e-6, 5.5e9},
                                           {"nvlink", 5e-6, 450e9},
                                           {"infiniband", 3e-6, 50e9},
                                           {"10gbe", 30e-6, 1.2e9},
                                           {"1gbe", 50e-6, 0.117e9},
                                           {"internet", 30e-3, 0.012e9}}};
  return all;
}

double sent_by_heads(const RankSizes& s, double rows, double embed_dim) {
  const double columns = (s.heads * s.value_dim + embed_dim) / s.ranks;
  return (s.ranks - 1) * rows * columns * s.element;
}

double sent_by_gather(const RankSizes& s) {
  return (s.ranks - 1) / s.ranks * s.tokens * s.kv_heads * (s.head_dim + s.value_dim) * s.element;
}

double sent_by_exchange(const RankSizes& s) {
  const double own = s.tokens / s.ranks;
  const double to_heads =
      s.heads / s.ranks * own * s.head_dim + shared_kv_heads(s) * own * (s.head_dim + s.value_dim);
  const double to_tokens = s.heads / s.ranks * own * s.value_dim;
  return (s.ranks - 1) * (to_heads + to_tokens) * s.element;
}

double sent_by_sequence(const RankSizes& s, double width) {
  const double rows = s.batch * s.heads / s.ranks;
  return (s.ranks - 1) * rows * (width * 4 + 8 + width * s.element);
}

double sent_by_latents(const RankSizes& s, double kv_rank, double rope_dim, double embed_dim) {
  const double rows = s.batch * s.heads / s.ranks;
  return (s.ranks - 1) * rows * ((kv_rank + rope_dim) * s.element + kv_rank * 4 + 8) +
         sent_by_heads(s, s.batch, embed_dim);
}

RingMerges ring_merges(int ranks) {
  RingMerges most;
  for (int rank = 0; rank < ranks; ++rank) {
    RingMerges own;
    // Queries of part p of the sequence have a partial result for each of the parts 0, ..., p.
    for (const std::int64_t results : {rank + 1, 2 * ranks - rank}) {
      const std::int64_t early = (results - 1) / (kRingParts - 1);  // each leaves one
      own.merges += static_cast<double>(early + 1);
      own.parts += static_cast<double>(results + early);
    }
    if (own.parts > most.parts) most = own;
  }
  return most;
}

double seconds_of(std::span<const RankStep> steps) {
  double seconds = 0;
  for (const RankStep& step : steps) seconds += std::max(step.compute, step.communication);
  return seconds;
}

std::vector<RankStep> steps_of(ContextScheme scheme, bool backward, int ranks, int stages,
                               double compute, double inputs, double results) {
  std::vector<RankStep> steps;
  if (scheme == ContextScheme::kRing) {
    // Backward has a rank's own keys twice, with half of its queries each time.
    const int last = backward ? ranks : ranks - 1;
    const double hop = ranks > 1 ? inputs / (ranks - 1) : 0;
    for (int step = 0; step <= last; ++step) {
      const bool is_half = backward && (step == 0 || step == last);
      steps.push_back({compute / ranks * (is_half ? 0.5 : 1),
                       (step + 1 < ranks ? hop : 0) + (step > 0 ? results / ranks : 0)});
    }
    return steps;
  }
  for (int step = 0; step < stages + 2; ++step) {
    const bool computes = step > 0 && step <= stages;
    steps.push_back({computes ? compute / stages : 0,
                     (step < stages ? inputs / stages : 0) + (step > 1 ? results / stages : 0)});
  }
  return steps;
}

}  // namespace ladon::bench
