// What `ladon bench` prints: its table, line by line, and what follows it.
#pragma once

#include <string>

#include "ladon/device.h"
#include "results.h"

namespace ladon::cli {

/// "Ladon 0.2.0, built by gcc 12.2.0; AMD EPYC, 2 threads".
std::string machine_line(DeviceId device, int threads);

void print_bench_head(const std::string& machine);
void print_bench_columns();
void print_bench_row(const bench::Row& row);
void print_bench_fault(const bench::Fault& fault);
void print_bench_peer(const bench::PeerState& peer);
/// Everything that is not a row.
void print_bench_rest(const bench::BenchmarkResults& results);

}  // namespace ladon::cli
