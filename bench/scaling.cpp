#include "scaling.h"

#include <algorithm>
#include <array>
#include <memory>
#include <string_view>

#include "pinning.h"

namespace ladon::bench {
namespace {

// Bound by arithmetic: one thread alone may come near the memory's limit.
constexpr std::array<std::string_view, 6> kLarge{
    "f32 forward B1 H8 S2048 D128 full",   "f32 forward B1 H8 S2048 D128 causal",
    "bf16 forward B1 H8 S2048 D128 full",  "f32 backward B1 H8 S2048 D128 full",
    "bf16 backward B1 H8 S2048 D128 full", "bf16 layer Llama-3-8B, prefill S1024"};

// Of a perfect speedup: 1.8 for two threads.
constexpr double kTarget = 0.9;

}  // namespace

std::vector<Case> scaled_cases(std::span<const Case> cases) {
  std::vector<Case> chosen;
  for (const Case& one : cases) {
    const bool large = std::find(kLarge.begin(), kLarge.end(), one.name()) != kLarge.end();
    if (large && one.isa == cases.back().isa) chosen.push_back(one);
  }
  return chosen;
}

void run_scaling(Session& session, const Case& one) {
  const std::unique_ptr<Context> all = session.make_context(one.isa);
  if (all->num_threads() == 1) return;
  session.listener().begin("scaling " + one.full_name());
  const std::unique_ptr<Context> single = session.make_context(one.isa, 1);
  const std::unique_ptr<Workload> workload = make_workload(*all, one);
  if (!session.passes(one, *workload, *all)) return;
  const PinnedThreads pinned(*all);
  const Limit limit = limit_here(*all, one.limit);
  const TimedPieces timed = time_in_turns(
      {Session::work_of(one, *workload, *single), session.ceiling(*single, limit, one.dtype()),
       Session::work_of(one, *workload, *all), session.ceiling(*all, limit, one.dtype())},
      session.limits());
  session.results().scaling.push_back(
      {.name = one.name(),
       .isa = ladon::name_of(one.isa),
       .threads = all->num_threads(),
       .speedup = timed.pieces[2].rate / timed.pieces[0].rate,
       .ceiling_speedup = timed.pieces[3].rate / timed.pieces[1].rate,
       .target = kTarget * all->num_threads(),
       .disturbed = timed.disturbed});
}

}  // namespace ladon::bench
