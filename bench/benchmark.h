// The benchmark: each case is checked, then timed in turns with the machine's own limit.
//
// Only ratios inside one run mean anything: the share of the ceiling, and one row beside another.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ladon/isa.h"
#include "problem.h"
#include "timing.h"

namespace ladon::bench {

struct BenchmarkOptions {
  bool quick = false;
  std::optional<Isa> isa{};  // empty: all that can run. Not the reference.
  std::string filter{};      // only cases whose "ISA case" holds this
  int threads = 0;           // 0: as a Context chooses
};

struct Row {
  std::string name;
  std::string isa;
  Bound bound = Bound::kCompute;
  int threads = 1;
  Timing timing;
  Timing ceiling;
  bool disturbed = false;
  std::optional<double> target{};  // share that is aimed at

  double share() const { return timing.rate / ceiling.rate; }
};

/// A case that gave a wrong answer, and was not timed.
struct Fault {
  std::string name;
  std::string isa;
  std::string what;
};

/// One thread against all of them, on one case.
struct Scaling {
  std::string name;
  std::string isa;
  int threads = 1;
  double speedup = 1;
  double ceiling_speedup = 1;  // of the FMA loop, in the same rounds
  bool disturbed = false;
};

struct BenchmarkResults {
  std::vector<Row> rows;
  std::vector<Fault> faults;
  std::optional<Scaling> scaling;
};

/// Told of everything as it happens. All of them must be set.
struct BenchmarkListener {
  std::function<void(const std::string& full_name)> begin;
  std::function<void(const Row&)> row;
  std::function<void(const Fault&)> fault;
};

/// How many cases the options ask for, the comparison of threads included.
int count_cases(const BenchmarkOptions& options);

BenchmarkResults run_benchmark(const BenchmarkOptions& options, const BenchmarkListener& listener);

}  // namespace ladon::bench
