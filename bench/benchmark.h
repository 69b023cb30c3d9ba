// The benchmark: each case is checked, then timed in turns with the machine's own limit.
//
// Only ratios inside one run mean anything: the share of the ceiling, and one row compared with
// another.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "ladon/device.h"
#include "ladon/isa.h"
#include "peers/peer.h"
#include "results.h"

namespace ladon::bench {

struct BenchmarkOptions {
  bool quick = false;  // fewer repetitions, and the fastest kernels alone unless isa says which
  DeviceId device{};
  std::optional<Isa> isa{};  // of the CPU; empty: all that can run. Not the reference.
  std::string filter{};      // only cases whose "ISA case" holds this
  int threads = 0;           // 0: as a Context chooses
  PeerOptions peers{};
};

/// Told of everything as it happens. All of them must be set.
struct BenchmarkListener {
  std::function<void(const std::string& full_name)> begin;
  std::function<void(const Row&)> row;
  std::function<void(const Fault&)> fault;
  std::function<void(const PeerState&)> peer;  // that it is there, or is left out from here on
};

/// How many cases the options select, all comparisons included.
int count_cases(const BenchmarkOptions& options);
/// About how long that takes without peers, on 2 cores that are otherwise idle.
double expected_seconds(const BenchmarkOptions& options);

BenchmarkResults run_benchmark(const BenchmarkOptions& options, const BenchmarkListener& listener);

}  // namespace ladon::bench
