// Workloads that only move memory: appending to a cache and gathering from it, optimiser steps.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ladon/dtype.h"
#include "workload.h"

namespace ladon::bench {

struct MemoryShape {
  enum class Kind : std::uint8_t {
    kAppend,  // bf16 keys and values of a whole sequence to a paged cache
    kGather,  // a whole sequence's keys and values out of it, as bf16 rows
    kAdamW,   // one step over bf16 weights
  };
  Kind kind = Kind::kAppend;
  DType storage = DType::kBF16;  // of the cache

  /// "bf16 append S32768 H8 D128, paged int8".
  std::string name() const;
};

/// Those of the benchmark.
std::vector<MemoryShape> memory_shapes();

/// Bytes count what is read and what is written, each once.
std::unique_ptr<Workload> make_memory_workload(const Context& context, const MemoryShape& shape);

}  // namespace ladon::bench
