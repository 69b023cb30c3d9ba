// ladon bench: the benchmark's results as a table while it goes on, or as one document at its end.
#include "benchmark.h"

#include <cstdio>
#include <string>

#include "bench_document.h"
#include "bench_report.h"
#include "commands.h"
#include "failure.h"
#include "output_file.h"
#include "plot/bench_chart.h"
#include "progress.h"
#include "rank_bench.h"
#include "rank_plan.h"
#include "signals.h"
#include "standard_streams.h"

namespace ladon::cli {
namespace {

void draw(const std::string& path, const bench::BenchmarkResults& results, std::string machine) {
  for (const bench::PeerState& peer : results.peers) {
    if (!peer.version.empty()) machine += "; " + peer.peer + " " + peer.version;
  }
  const std::string picture = draw_bench_chart(path, results.rows, machine)->bytes();
  const HeldSignals held;
  OutputFile("bench: --plot", output_path(path), picture).commit();
}

/// --ranks: attention over threads with emulated links.
int run_rank_bench(const BenchOptions& options) {
  if (!options.filter.empty() || !options.peers.empty() || !options.plot.empty()) {
    throw UsageError("bench: --ranks: combines only with --link, --quick, --isa and --json");
  }
  if (options.machinery.device != DeviceId()) {
    throw UsageError("bench: --ranks: emulated links run on the CPU only");
  }
  const Link link = parse_link(options.link);
  const auto ranks = static_cast<int>(options.ranks);
  // Also with --quick the fastest of three counts: the first has page faults that no model knows.
  const bench::RankBenchOptions wanted{.tokens =
                                           bench::usual_tokens(ranks, options.quick ? 1024 : 4096)};
  const ContextOptions context_options = options.machinery.context_options();
  if (options.json) {
    const auto rows = bench::bench_emulated_ranks(context_options, ranks, wanted, link);
    const Isa isa = Context(context_options).isa();
    print_json(rank_bench_document(rows, link, ranks, options.quick, isa));
    return bench::all_right(rows) ? kExitGood : kExitFailed;
  }
  std::printf(
      "%d ranks over an emulated %s (%.3g us, %.3g GB/s); f32, causal, %lld heads, %lld KV "
      "heads of %lld\n",
      ranks, link.name.c_str(), 1e6 * link.latency, 1e-9 * link.bandwidth,
      static_cast<long long>(wanted.num_heads), static_cast<long long>(wanted.num_kv_heads),
      static_cast<long long>(wanted.head_dim));
  const auto rows = bench::bench_emulated_ranks(context_options, ranks, wanted, link);
  std::printf("%s", bench::rank_table(rows).c_str());
  return bench::all_right(rows) ? kExitGood : kExitFailed;
}

}  // namespace

int run_bench(const BenchOptions& options) {
  if (options.machinery.isa == Isa::kReference) {
    throw UsageError("bench: --isa: the reference is not benchmarked");
  }
  if (options.ranks > 1) return run_rank_bench(options);
  if (!options.plot.empty()) {
    check_picture_path("bench: --plot", options.plot);
    claim_standard_output("bench", {options.plot}, options.json);
    check_writable("bench: --plot", output_path(options.plot));
  }
  const Context context(options.machinery.context_options());
  const int threads = context.num_threads();
  const std::string machine = machine_line(options.machinery.device, threads);
  const bench::BenchmarkOptions wanted{
      .quick = options.quick,
      .device = options.machinery.device,
      .isa = options.machinery.isa,
      .filter = options.filter,
      .threads = options.machinery.threads,
      .peers = {.interpreter = options.peers, .seconds = static_cast<double>(options.peer_limit)}};
  const int count = bench::count_cases(wanted);
  if (count == 0) {
    throw UsageError("bench: --filter: no case contains '" + options.filter + "'");
  }
  bench::BenchmarkResults results;
  {
    Progress progress;
    BenchTable table;
    RemainingTime remaining(count, bench::expected_seconds(wanted));
    const auto clear_and = [&](auto print) {
      return [&, print](const auto& one) {
        if (options.json) return;
        progress.clear();
        print(one);
      };
    };
    const auto in_table = clear_and([&](const auto& one) { table.print(one); });
    const bench::BenchmarkListener listener{
        .begin = [&](const std::string& name) { progress.show(remaining.begin(name)); },
        .row = in_table,
        .fault = in_table,
        .peer = clear_and(print_bench_peer)};
    if (!options.json) print_bench_head(machine, count, bench::expected_seconds(wanted));
    if (!options.peers.empty()) progress.show("starting the peers");
    results = bench::run_benchmark(wanted, listener);
  }
  if (!options.plot.empty()) draw(options.plot, results, machine);
  if (options.json) {
    print_json(bench_document(results, options.quick, options.machinery.device, threads));
  } else {
    print_bench_rest(results);
    if (!options.plot.empty()) std::printf("\nwrote %s\n", shown_output(options.plot).c_str());
  }
  return results.faults.empty() ? kExitGood : kExitFailed;
}

}  // namespace ladon::cli
