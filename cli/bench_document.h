// What `ladon bench` prints with --json.
#pragma once

#include "json_output.h"
#include "ladon/device.h"
#include "results.h"

namespace ladon::cli {

Json bench_document(const bench::BenchmarkResults& results, bool quick, DeviceId device,
                    int threads);

}  // namespace ladon::cli
