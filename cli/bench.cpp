// ladon bench: the benchmark's results as a table while it goes on, or as one document at its end.
#include <cstdio>
#include <ctime>
#include <string>

#include "benchmark.h"
#include "commands.h"
#include "failure.h"
#include "json_output.h"
#include "ladon/version.h"
#include "machine.h"
#include "progress.h"

namespace ladon::cli {
namespace {

using bench::Bound;
using bench::Fault;
using bench::Row;
using bench::Scaling;

const char* unit_of(Bound bound) { return bound == Bound::kCompute ? "GFLOP/s" : "GB/s"; }

void print_head(int threads) {
  std::printf("Ladon %s, built by %s; %s, %d %s\n", version(), compiler_name().c_str(),
              cpu_name().c_str(), threads, threads == 1 ? "thread" : "threads");
  std::printf(
      "Ceilings: FMA, or memory read, measured in turns with the case. K and V count once.\n\n");
  std::printf("%-9s %-52s %10s %10s %9s %-8s %8s %7s\n", "kernels", "case", "median ms", "p10 ms",
              "rate", "", "ceiling", "share");
}

void print_row(const Row& row) {
  std::printf("%-9s %-52s %10.2f %10.2f %9.1f %-8s %8.1f %6.1f%%", row.isa.c_str(),
              row.name.c_str(), row.timing.median_ms, row.timing.p10_ms, row.timing.rate / 1e9,
              unit_of(row.bound), row.ceiling.rate / 1e9, 100 * row.share());
  if (row.target) std::printf("  target %.0f%%", 100 * *row.target);
  if (row.disturbed) {
    std::printf("  disturbed: the CPUs are busy");
  } else if (row.target) {
    std::printf(row.share() >= *row.target ? ": met" : ": missed");
  }
  std::printf("\n");
  std::fflush(stdout);
}

void print_fault(const Fault& fault) {
  std::printf("%-9s %-52s WRONG: %s\n", fault.isa.c_str(), fault.name.c_str(), fault.what.c_str());
  std::fflush(stdout);
}

void print_scaling(const Scaling& scaling) {
  std::printf("\n%s %s: %d threads are %.2f times as fast as 1 (the FMA loop: %.2f times)%s\n",
              scaling.isa.c_str(), scaling.name.c_str(), scaling.threads, scaling.speedup,
              scaling.ceiling_speedup, scaling.disturbed ? "; disturbed" : "");
}

Json row_json(const Row& row) {
  const bool compute = row.bound == Bound::kCompute;
  Json json;
  json["name"] = row.name;
  json["isa"] = row.isa;
  json["threads"] = row.threads;
  json["share"] = row.share();
  if (row.target) json["target"] = *row.target;
  json["median_ms"] = row.timing.median_ms;
  json["p10_ms"] = row.timing.p10_ms;
  json["disturbed"] = row.disturbed;
  json["repetitions"] = row.timing.repetitions;
  json[compute ? "gflops" : "gbps"] = row.timing.rate / 1e9;
  json[compute ? "ceiling_gflops" : "ceiling_gbps"] = row.ceiling.rate / 1e9;
  return json;
}

std::string utc_date() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[32];
  return {text, std::strftime(text, sizeof text, "%Y-%m-%d", &parts)};
}

Json document_of(const bench::BenchmarkResults& results, bool quick, int threads) {
  Json document = json_document("bench");
  document["compiler"] = compiler_name();
  document["cpu"] = cpu_name();
  document["threads"] = threads;
  document["date"] = utc_date();
  document["quick"] = quick;
  document["rows"] = Json::array();
  for (const Row& row : results.rows) document["rows"].push_back(row_json(row));
  document["faults"] = Json::array();
  for (const Fault& fault : results.faults) {
    document["faults"].push_back({{"name", fault.name}, {"isa", fault.isa}, {"what", fault.what}});
  }
  if (const auto& scaling = results.scaling) {
    document["scaling"] = {{"name", scaling->name},
                           {"isa", scaling->isa},
                           {"threads", scaling->threads},
                           {"speedup", scaling->speedup},
                           {"ceiling_speedup", scaling->ceiling_speedup},
                           {"disturbed", scaling->disturbed}};
  }
  return document;
}

}  // namespace

int run_bench(const BenchOptions& options) {
  if (options.machinery.isa == Isa::kReference) {
    throw UsageError("bench: --isa: the reference is not benchmarked");
  }
  const int threads = Context(options.machinery.context_options()).num_threads();
  const bench::BenchmarkOptions wanted{.quick = options.quick,
                                       .isa = options.machinery.isa,
                                       .filter = options.filter,
                                       .threads = options.machinery.threads};
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
              progress.show(std::to_string(++begun) + " of " + std::to_string(count) + ": " + name);
            },
        .row = clear_and(print_row),
        .fault = clear_and(print_fault)};
    if (!options.json) print_head(threads);
    results = bench::run_benchmark(wanted, listener);
  }
  if (options.json) {
    print_json(document_of(results, options.quick, threads));
  } else if (results.scaling) {
    print_scaling(*results.scaling);
  }
  return results.faults.empty() ? kExitGood : kExitFailed;
}

}  // namespace ladon::cli
