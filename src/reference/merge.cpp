#include "reference/merge.h"

#include <cmath>
#include <cstddef>
#include <limits>

#include "core/arena.h"
#include "core/element.h"
#include "core/parallel.h"

namespace ladon::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// sums += weight * row, with the dtype's switch outside the loop for the types that splits use.
void add_row(const PartialRow& part, double weight, std::int64_t value_dim, double* sums) {
  if (part.dtype == DType::kF32) {
    const auto* row = static_cast<const float*>(part.out);
    for (std::int64_t i = 0; i < value_dim; ++i) sums[i] += weight * static_cast<double>(row[i]);
    return;
  }
  for (std::int64_t i = 0; i < value_dim; ++i) {
    sums[i] += weight * load_element(part.out, part.dtype, i);
  }
}

/// The same for storing: a switch for each element takes as long as a part's sum.
void store_row(const double* sums, std::int64_t value_dim, void* out, DType dtype) {
  if (dtype == DType::kF32) {
    auto* row = static_cast<float*>(out);
    for (std::int64_t i = 0; i < value_dim; ++i) row[i] = static_cast<float>(sums[i]);
    return;
  }
  for (std::int64_t i = 0; i < value_dim; ++i) store_element(out, dtype, i, sums[i]);
}

/// Scratch of each thread.
struct MergeScratch {
  MergeScratch(Arena& arena, std::int64_t threads, std::size_t num_parts, std::int64_t value_dim)
      : parts_per_thread(num_parts),
        value_dim_(value_dim),
        parts(arena.take<PartialRow>(threads * static_cast<std::int64_t>(num_parts))),
        sums(arena.take<double>(threads * value_dim)) {}

  std::span<PartialRow> parts_of(int worker) const {
    return {parts + static_cast<std::size_t>(worker) * parts_per_thread, parts_per_thread};
  }
  double* sums_of(int worker) const { return sums + worker * value_dim_; }

  std::size_t parts_per_thread;
  std::int64_t value_dim_;
  PartialRow* parts;
  double* sums;
};

std::int64_t out_offset(const MergePart& part, std::int64_t batch, std::int64_t token,
                        std::int64_t head) {
  return batch * part.out_strides[0] + token * part.out_strides[1] + head * part.out_strides[2];
}

std::int64_t lse_offset(const MergePart& part, std::int64_t batch, std::int64_t token,
                        std::int64_t head) {
  return batch * part.lse_strides[0] + head * part.lse_strides[1] + token * part.lse_strides[2];
}

}  // namespace

double merge_rows(std::span<const PartialRow> parts, std::int64_t value_dim, const double* sink,
                  double* sums, void* out, DType out_dtype) noexcept {
  double maximum = -kInfinity;
  bool saw_something = false;
  for (const PartialRow& part : parts) {
    saw_something = saw_something || part.lse != -kInfinity;
    if (part.lse > maximum) maximum = part.lse;
  }
  for (std::int64_t i = 0; i < value_dim; ++i) sums[i] = 0;
  double lse = -kInfinity;
  if (saw_something) {
    if (sink != nullptr && *sink > maximum) maximum = *sink;
    double denominator = sink == nullptr ? 0 : std::exp(*sink - maximum);
    for (const PartialRow& part : parts) {
      if (part.lse == -kInfinity) continue;  // its row may hold anything
      const double weight = std::exp(part.lse - maximum);
      denominator += weight;
      add_row(part, weight, value_dim, sums);
    }
    for (std::int64_t i = 0; i < value_dim; ++i) sums[i] /= denominator;
    lse = maximum + std::log(denominator);
  }
  store_row(sums, value_dim, out, out_dtype);
  return lse;
}

void merge(Host& host, const MergeParams& params) {
  const InWorkspace<MergeScratch> scratch(host.scratch, std::int64_t{host.workers.num_threads()},
                                          params.parts.size(), params.value_dim);
  const MergePart& result = params.result;
  parallel_for(host.workers, params.batch * params.query_len, [&](std::int64_t task, int worker) {
    const std::int64_t batch = task / params.query_len;
    const std::int64_t token = task % params.query_len;
    const std::span<PartialRow> rows = scratch->parts_of(worker);
    for (std::int64_t head = 0; head < params.num_heads; ++head) {
      for (std::size_t i = 0; i < rows.size(); ++i) {
        const MergePart& part = params.parts[i];
        rows[i] = {element_at(part.out, part.out_dtype, out_offset(part, batch, token, head)),
                   part.out_dtype,
                   load_element(part.lse, part.lse_dtype, lse_offset(part, batch, token, head))};
      }
      double sink = 0;
      if (params.sinks.data != nullptr) sink = head_element(params.sinks, head);
      void* const row = element_at(const_cast<void*>(result.out), result.out_dtype,
                                   out_offset(result, batch, token, head));
      const double lse =
          merge_rows(rows, params.value_dim, params.sinks.data == nullptr ? nullptr : &sink,
                     scratch->sums_of(worker), row, result.out_dtype);
      if (result.lse == nullptr) continue;
      store_element(const_cast<void*>(result.lse), result.lse_dtype,
                    lse_offset(result, batch, token, head), lse);
    }
  });
}

}  // namespace ladon::reference
