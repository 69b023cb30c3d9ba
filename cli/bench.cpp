// ladon bench: the benchmark's results as a table while it goes on, or as one document at its end.
#include "benchmark.h"

#include <string>

#include "bench_document.h"
#include "bench_report.h"
#include "commands.h"
#include "failure.h"
#include "progress.h"

namespace ladon::cli {

int run_bench(const BenchOptions& options) {
  if (options.machinery.isa == Isa::kReference) {
    throw UsageError("bench: --isa: the reference is not benchmarked");
  }
  const int threads = Context(options.machinery.context_options()).num_threads();
  const bench::BenchmarkOptions wanted{
      .quick = options.quick,
      .isa = options.machinery.isa,
      .filter = options.filter,
      .threads = options.machinery.threads,
      .peers = {.interpreter = options.peers, .seconds = static_cast<double>(options.peer_limit)}};
  const int count = bench::count_cases(wanted);
  if (count == 0) {
    throw UsageError("bench: --filter: no case holds '" + options.filter + "'");
  }
  bench::BenchmarkResults results;
  {
    Progress progress;
    int begun = 0;
    const auto clear_and = [&](auto print) {
      return [&, print](const auto& one) {
        if (options.json) return;
        progress.clear();
        print(one);
      };
    };
    const bench::BenchmarkListener listener{
        .begin =
            [&](const std::string& name) {
              if (begun == 0 && !options.json) {
                progress.clear();
                print_bench_columns();
              }
              progress.show(std::to_string(++begun) + " of " + std::to_string(count) + ": " + name);
            },
        .row = clear_and(print_bench_row),
        .fault = clear_and(print_bench_fault),
        .peer = clear_and(print_bench_peer)};
    if (!options.json) print_bench_head(threads);
    if (!options.peers.empty()) progress.show("starting the peers");
    results = bench::run_benchmark(wanted, listener);
  }
  if (options.json) {
    print_json(bench_document(results, options.quick, threads));
  } else {
    print_bench_rest(results);
  }
  return results.faults.empty() ? kExitGood : kExitFailed;
}

}  // namespace ladon::cli
