// What `ladon bench` prints: its table, line by line, and what follows it.
#pragma once

#include <string>

#include "ladon/device.h"
#include "results.h"

namespace ladon::cli {

/// "Ladon 0.2.0, built by gcc 12.2.0; AMD EPYC, 2 threads".
std::string machine_line(DeviceId device, int threads);

/// With how many measurements come, and how long they take.
void print_bench_head(const std::string& machine, int count, double seconds);

/// The table of cases, a line as soon as each is measured.
class BenchTable {
 public:
  void print(const bench::Row& row);
  void print(const bench::Fault& fault);

 private:
  void begin();
  void begin_kernels(const std::string& kernels);

  bool begun_ = false;
  bool narrow_ = false;
  std::string kernels_{};  // of the last line
};

void print_bench_peer(const bench::PeerState& peer);
/// Everything that is not a row.
void print_bench_rest(const bench::BenchmarkResults& results);

}  // namespace ladon::cli
