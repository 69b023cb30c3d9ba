// Speed and correctness of one layer on this machine: what a row of `ladon compare` is made of.
#pragma once

#include <functional>
#include <string>

#include "ceiling.h"
#include "commands.h"
#include "layer_size.h"

namespace ladon::cli {

/// A rate, and the most that this machine could do.
struct MeasuredRate {
  double tokens_per_second = 0;
  double ceiling = 0;      // tokens per second
  std::string_view bound;  // of the ceiling: "memory", "FMA", "BF16", "AMX" or "product"
  bool disturbed = false;  // other programs took the CPUs: the number means little
  double share() const { return tokens_per_second / ceiling; }
};

struct LayerMeasurement {
  LayerVariant variant;
  std::string details;
  double weights = 0;  // elements
  MeasuredRate prefill{};
  MeasuredRate decode{};
  double cache_bytes_per_token = 0;
  double reduction = 0;  // against MHA
  double error = 0;      // the largest, against the reference
  double allowed = 0;
  double fma_gflops = 0;  // the ceilings of this row
  double read_gbps = 0;

  bool good() const { return error <= allowed; }
};

/// Bytes that measuring takes at its largest, all variants considered.
double memory_to_measure(const LayerSize& size, const CompareOptions& options);

/// `say` is told of each step, of which there are so many.
inline constexpr int kStepsOfALayer = 5;
LayerMeasurement measure_layer(const Context& context, const bench::ReadBuffer& buffer,
                               const LayerSize& size, const LayerVariant& variant,
                               const CompareOptions& options,
                               const std::function<void(const std::string&)>& say);

}  // namespace ladon::cli
