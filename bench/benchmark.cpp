#include "benchmark.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <memory>
#include <vector>

#include "cases.h"
#include "gpu_cases.h"
#include "gradient_accuracy.h"
#include "growth.h"
#include "pinning.h"
#include "scaling.h"
#include "session.h"

namespace ladon::bench {
namespace {

/// Everything that the options select.
struct Plan {
  std::vector<Case> cases{};
  std::vector<Case> scaled{};
  std::vector<Series> series{};
  std::vector<Neighbourhood> neighbourhoods{};
  std::vector<Shape> gradients{};
  Isa fastest = Isa::kBaseline;  // of those that are measured

  int count() const {
    return static_cast<int>(cases.size() + scaled.size() + series.size() + neighbourhoods.size() +
                            gradients.size());
  }
  /// How many shapes are checked and timed for them. Those of a series are short, but for the last.
  std::size_t count_shapes() const {
    std::size_t shapes = cases.size() + 2 * (scaled.size() + series.size()) + gradients.size();
    for (const Neighbourhood& one : neighbourhoods) shapes += 1 + one.others.size();
    return shapes;
  }
};

/// Everything that the CPU, or a GPU, is measured by.
Plan whole_plan(const BenchmarkOptions& options) {
  Plan plan;
  if (!options.device.is_cpu()) {
    plan.cases = list_gpu_cases(options.device);
    plan.fastest = plan.cases.back().isa;
    return plan;
  }
  std::vector<Isa> isas;  // slowest first
  Isa fastest_here = Isa::kBaseline;
  for (const IsaInfo& info : list_isas()) {
    if (!info.runnable || info.isa == Isa::kReference) continue;
    fastest_here = info.isa;
    if (!options.isa || *options.isa == info.isa) isas.push_back(info.isa);
  }
  if (isas.empty()) return plan;
  if (options.quick) isas.erase(isas.begin(), isas.end() - 1);
  plan.cases = list_cases(isas, fastest_here);
  plan.fastest = isas.back();
  plan.scaled = scaled_cases(plan.cases);
  plan.series = list_series(plan.fastest, options.quick);
  plan.neighbourhoods = list_neighbourhoods(plan.fastest, options.quick);
  return plan;
}

Plan plan_of(const BenchmarkOptions& options) {
  Plan plan = whole_plan(options);
  if (!options.peers.interpreter.empty()) plan.gradients = gradient_shapes();
  const auto keep = [&](auto& list, const auto& name_in_filter) {
    std::erase_if(list, [&](const auto& one) {
      return name_in_filter(one).find(options.filter) == std::string::npos;
    });
  };
  keep(plan.cases, [](const Case& one) { return one.full_name(); });
  keep(plan.scaled, [](const Case& one) { return "scaling " + one.full_name(); });
  keep(plan.series, [](const Series& one) { return one.name(); });
  keep(plan.neighbourhoods, [](const Neighbourhood& one) { return one.name(); });
  keep(plan.gradients, gradient_name);
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
  const std::unique_ptr<Workload> workload = make_workload(*context, one);
  if (!session.passes(one, *workload, *context)) return;
  const Limit limit = limit_here(*context, one.limit);
  Row row{
      .name = one.name(), .isa = one.kernels(), .limit = limit, .threads = context->num_threads()};
  set_target(row, one);
  std::vector<Peer*> peers;
  if (one.fastest && one.peer_shape() != nullptr) {
    peers = session.prepare_peers(*one.peer_shape(), row);
  }
  std::vector<Work> pieces{Session::work_of(one, *workload, *context),
                           session.ceiling(*context, limit, one.dtype())};
  for (Peer* peer : peers) pieces.push_back(peer->work());
  {
    const PinnedThreads pinned(*context);
    const TimedPieces timed = time_in_turns(pieces, session.limits());
    row.timing = timed.pieces[0];
    row.ceiling = timed.pieces[1];
    row.disturbed = timed.disturbed;
    for (std::size_t i = 0; i < peers.size(); ++i) {
      row.peers.push_back({.peer = peers[i]->name(),
                           .timing = timed.pieces[2 + i],
                           .why_not = peers[i]->problem()});
    }
  }
  session.release_peers(peers);
  session.results().rows.push_back(row);
  session.listener().row(row);
}

}  // namespace

int count_cases(const BenchmarkOptions& options) { return plan_of(options).count(); }

double expected_seconds(const BenchmarkOptions& options) {
  // One shape, with its check, on 2 cores: measured over all cases.
  const double each = options.quick ? 1.7 : 8;
  return each * static_cast<double>(plan_of(options).count_shapes());
}

BenchmarkResults run_benchmark(const BenchmarkOptions& options, const BenchmarkListener& listener) {
  const Plan plan = plan_of(options);
  Session session(options, listener);
  session.start_peers();
  for (const Case& one : plan.cases) run_case(session, one);
  for (const Case& one : plan.scaled) run_scaling(session, one);
  for (const Series& one : plan.series) fit_exponent(session, one);
  for (const Neighbourhood& one : plan.neighbourhoods) compare_neighbours(session, one);
  for (const Shape& shape : plan.gradients) compare_gradients(session, plan.fastest, shape);
  return std::move(session.results());
}

}  // namespace ladon::bench
