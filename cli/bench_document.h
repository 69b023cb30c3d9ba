// What `ladon bench` prints with --json.
#pragma once

#include "json_output.h"
#include "results.h"

namespace ladon::cli {

Json bench_document(const bench::BenchmarkResults& results, bool quick, int threads);

}  // namespace ladon::cli
