#include "benchmark.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <memory>
#include <vector>

#include "cases.h"
#include "pinning.h"
#include "scaling.h"
#include "session.h"

namespace ladon::bench {
namespace {

/// Those that can run, slowest first.
std::vector<Isa> runnable_isas() {
  std::vector<Isa> isas;
  for (const IsaInfo& info : list_isas()) {
    if (info.runnable && info.isa != Isa::kReference) isas.push_back(info.isa);
  }
  return isas;
}

/// Everything that the options ask for.
struct Plan {
  std::vector<Case> cases{};
  std::vector<Case> scaled{};

  int count() const { return static_cast<int>(cases.size() + scaled.size()); }
};

Plan plan_of(const BenchmarkOptions& options) {
  const std::vector<Isa> runnable = runnable_isas();
  std::vector<Isa> isas = runnable;
  if (options.isa) std::erase_if(isas, [&](Isa isa) { return isa != *options.isa; });
  Plan plan;
  if (isas.empty()) return plan;
  plan.cases = list_cases(isas, runnable.back());
  plan.scaled = scaled_cases(plan.cases);
  const auto keep = [&](std::vector<Case>& cases, const std::string& prefix) {
    std::erase_if(cases, [&](const Case& one) {
      return (prefix + one.full_name()).find(options.filter) == std::string::npos;
    });
  };
  keep(plan.cases, "");
  keep(plan.scaled, "scaling ");
  return plan;
}

/// Fills in what the row is to reach, or why that does not apply here.
void set_target(Row& row, const Case& one) {
  if (!one.target) return;
  const Target& target = *one.target;
  if (target.pytorch_ratio > 0) row.pytorch_target = target.pytorch_ratio;
  if (target.share <= 0) return;
  if (target.limit == row.limit) {
    row.target = target.share;
    return;
  }
  std::array<char, 96> text{};
  std::snprintf(text.data(), text.size(), "%.0f%% of %s does not apply: there is no %s here",
                100 * target.share, name_of(target.limit), name_of(target.limit));
  row.target_does_not_apply = text.data();
}

void run_case(Session& session, const Case& one) {
  session.listener().begin(one.full_name());
  const std::unique_ptr<Context> context = session.make_context(one.isa);
  const std::unique_ptr<Workload> workload = make_workload(one);
  if (!session.passes(one, *workload, *context)) return;
  const PinnedThreads pinned(*context);
  const Limit limit = limit_here(*context, one.limit);
  const TimedPieces timed = time_in_turns(
      {Session::work_of(one, *workload, *context), session.ceiling(*context, limit, one.dtype())},
      session.limits());
  Row row{.name = one.name(),
          .isa = ladon::name_of(one.isa),
          .limit = limit,
          .threads = context->num_threads(),
          .timing = timed.pieces[0],
          .ceiling = timed.pieces[1],
          .disturbed = timed.disturbed};
  set_target(row, one);
  session.results().rows.push_back(row);
  session.listener().row(row);
}

}  // namespace

int count_cases(const BenchmarkOptions& options) { return plan_of(options).count(); }

BenchmarkResults run_benchmark(const BenchmarkOptions& options, const BenchmarkListener& listener) {
  const Plan plan = plan_of(options);
  Session session(options, listener);
  for (const Case& one : plan.cases) run_case(session, one);
  for (const Case& one : plan.scaled) run_scaling(session, one);
  return std::move(session.results());
}

}  // namespace ladon::bench
