// What several ranks would hold, send and wait for: the arithmetic behind `ladon plan --ranks`.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cache_plan.h"
#include "rank_model.h"

namespace ladon::cli {

using bench::Link;

/// What --link says: a usual one by name, or "LATENCY,BANDWIDTH" such as "30us,1.2GB/s". Throws
/// UsageError.
Link parse_link(std::string_view text);

/// One way to divide attention among ranks (docs/parallel.md), for all layers of a model.
struct RankScheme {
  std::string_view phase;  // "prefill" of the whole context, or "decode" of one token a sequence
  std::string_view name;
  std::string refused{};         // why the model's heads do not allow it; then the rest is 0
  std::int64_t cache_bytes = 0;  // of the rank that has most
  double sent = 0;               // bytes by one rank
  double seconds = 0;            // of communication, with nothing hidden behind computation
  bool least = false;            // of its phase
};

std::vector<RankScheme> rank_schemes(const ModelShape& model, const CacheRequest& request,
                                     std::int64_t ranks, const Link& link);

}  // namespace ladon::cli
