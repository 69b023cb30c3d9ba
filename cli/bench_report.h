// What `ladon bench` prints: its table, line by line, and what follows it.
#pragma once

#include "results.h"

namespace ladon::cli {

void print_bench_head(int threads);
void print_bench_columns();
void print_bench_row(const bench::Row& row);
void print_bench_fault(const bench::Fault& fault);
void print_bench_peer(const bench::PeerState& peer);
/// Everything that is no row.
void print_bench_rest(const bench::BenchmarkResults& results);

}  // namespace ladon::cli
