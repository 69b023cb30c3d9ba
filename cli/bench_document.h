// What `ladon bench` prints with --json.
#pragma once

#include <vector>

#include "json_output.h"
#include "ladon/device.h"
#include "ladon/isa.h"
#include "rank_bench.h"
#include "results.h"

namespace ladon::cli {

Json bench_document(const bench::BenchmarkResults& results, bool quick, DeviceId device,
                    int threads);

/// And with --ranks.
Json rank_bench_document(const std::vector<bench::RankRow>& rows, const bench::Link& link,
                         int ranks, bool quick, Isa isa);

}  // namespace ladon::cli
