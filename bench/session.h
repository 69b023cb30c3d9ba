// Session: what all measurements of one run share.
#pragma once

#include <memory>
#include <string>

#include "benchmark.h"
#include "cases.h"
#include "ceiling.h"
#include "ladon/context.h"
#include "workload.h"

namespace ladon::bench {

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
  static std::unique_ptr<Context> make_context(Isa isa, int threads);

  /// What bounds the case here. The context must outlive the work.
  Work ceiling(const Context& context, Limit limit, DType dtype);
  /// The case itself: flops, or bytes where memory bounds it. All must outlive the work.
  static Work work_of(const Case& one, Workload& workload, const Context& context);

  /// False, and said so, when the case gives a wrong answer.
  bool passes(const Case& one, Workload& workload, const Context& context);

 private:
  BenchmarkOptions options_;
  const BenchmarkListener& listener_;
  TimingLimits limits_{};
  std::unique_ptr<ReadBuffer> buffer_;  // made when first wanted
  BenchmarkResults results_;
};

}  // namespace ladon::bench
