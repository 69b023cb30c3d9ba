// One attention problem over ranks, for benchmarks: the whole, a rank's part of it, and the bytes
// that the rank sends by the formulas of docs/parallel.md.
#pragma once

#include <cstdint>

#include "ladon/attention.h"
#include "ladon/communicator.h"
#include "ladon/context_parallel.h"
#include "rank_bench.h"

namespace ladon::bench {

/// One causal sequence in f32, whole on every rank.
struct RankProblem {
  RankProblem(const Context& context, const RankBenchOptions& wanted, std::int64_t length);

  std::int64_t tokens;
  RankBenchOptions sizes;
  AttentionOptions options{.causal = true};
  Tensor q, k, v, dout, out, lse, dq, dk, dv;
};

/// A rank's tokens of a problem.
class RankPart {
 public:
  RankPart(const Context& context, Communicator& communicator, const RankProblem& whole,
           ContextScheme scheme);

  void run(bool backward);
  /// Against one process.
  double error(bool backward) const;

 private:
  Tensor own(const Tensor& whole, int dim = 1) const;

  const Context& context_;
  Communicator& communicator_;
  const RankProblem& whole_;
  ContextPlan plan_;
  Tensor q_, k_, v_, dout_, out_, lse_, dq_, dk_, dv_;
};

/// What a rank sends, for an even zigzag: docs/parallel.md.
struct RankVolume {
  double inputs = 0;
  double results = 0;
};
RankVolume volume_of(const RankProblem& problem, ContextScheme scheme, bool backward, int ranks,
                     int rank);

}  // namespace ladon::bench
