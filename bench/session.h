// Session: what all measurements of one run share.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "benchmark.h"
#include "cases.h"
#include "ceiling.h"
#include "ladon/context.h"
#include "peers/peer.h"
#include "workload.h"

namespace ladon::bench {

/// How long one measurement goes on.
TimingLimits timing_limits(const BenchmarkOptions& options);

class Session {
 public:
  Session(const BenchmarkOptions& options, const BenchmarkListener& listener);

  const BenchmarkOptions& options() const { return options_; }
  const BenchmarkListener& listener() const { return listener_; }
  const TimingLimits& limits() const { return limits_; }
  BenchmarkResults& results() { return results_; }

  /// With as many threads as the options say, or with this many.
  std::unique_ptr<Context> make_context(Isa isa) const {
    return make_context(isa, options_.threads);
  }
  std::unique_ptr<Context> make_context(Isa isa, int threads) const;

  /// What bounds the case here. The context must outlive the work.
  Work ceiling(const Context& context, Limit limit, DType dtype);
  /// The case itself: flops, or bytes where memory bounds it. All must outlive the work.
  static Work work_of(const Case& one, Workload& workload, const Context& context);

  /// Starts the peers that were requested: while no thread is pinned, because that is inherited.
  void start_peers();
  /// Null where it is not there, or has failed.
  Peer* peer(const std::string& name);
  /// Those that can run this shape, ready to; of the others the reasons are added to `row`.
  std::vector<Peer*> prepare_peers(const Shape& shape, Row& row);
  /// Lets their memory go.
  void release_peers(const std::vector<Peer*>& prepared);

  /// Keeps the results' list of peers true, and tells of those that have failed.
  void note_peers();

  /// False, and said so, when the case gives a wrong answer.
  bool passes(const Case& one, Workload& workload, const Context& context);

 private:
  BenchmarkOptions options_;
  const BenchmarkListener& listener_;
  TimingLimits limits_;
  std::unique_ptr<ReadBuffer> buffer_;  // made when first wanted
  std::vector<std::unique_ptr<Peer>> peers_;
  BenchmarkResults results_;
};

}  // namespace ladon::bench
