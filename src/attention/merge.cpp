#include "attention/merge.h"

#include <cmath>
#include <cstddef>
#include <limits>
#include <string>
#include <vector>

#include "attention/validate.h"
#include "core/context_impl.h"
#include "core/element.h"
#include "core/fail.h"
#include "core/integer.h"
#include "core/parallel.h"
#include "ladon/attention.h"

namespace ladon {
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
  for (std::int64_t i = 0; i < value_dim; ++i) store_element(out, out_dtype, i, sums[i]);
  return lse;
}

void merge_attention(const Context& context, std::span<const ConstTensorView> outs,
                     std::span<const ConstTensorView> lses, const TensorView& out,
                     const TensorView& lse, const ConstTensorView& sinks) {
  constexpr std::string_view kOperation = "merge_attention";
  if (outs.empty()) fail(kOperation, "outs", "got no parts, expected 1 or more");
  if (lses.size() != outs.size()) {
    fail(kOperation, "lses",
         "got " + std::to_string(lses.size()) + " parts, expected " + std::to_string(outs.size()) +
             " as in outs");
  }
  check_view(kOperation, {"out", out}, 4);
  check_float(kOperation, {"out", out});
  const Dims lse_shape{out.size(0), out.size(2), out.size(1)};
  const auto check_lse_part = [&](const NamedView& argument) {
    check_strided_view(kOperation, argument, 3);
    check_shape(kOperation, argument, lse_shape);
    if (argument.view.dtype() != DType::kF32 && argument.view.dtype() != DType::kF64) {
      fail(kOperation, argument.name,
           std::string("got dtype ") + name_of(argument.view.dtype()) + ", expected f32 or f64");
    }
  };
  std::vector<std::string> names;
  names.reserve(2 * outs.size());  // the views below point into it
  std::vector<NamedView> inputs{{"sinks", sinks}};
  for (std::size_t i = 0; i < outs.size(); ++i) {
    inputs.push_back({names.emplace_back("outs[" + std::to_string(i) + "]"), outs[i]});
    check_view(kOperation, inputs.back(), 4);
    check_float(kOperation, inputs.back());
    check_shape(kOperation, inputs.back(), out.shape());
    inputs.push_back({names.emplace_back("lses[" + std::to_string(i) + "]"), lses[i]});
    check_lse_part(inputs.back());
  }
  if (!lse.absent()) check_lse_part({"lse", lse});
  if (!sinks.absent()) {
    check_strided_floats(kOperation, {"sinks", sinks}, {out.size(2)});
  }
  const NamedView outputs[] = {{"out", out}, {"lse", lse}};
  check_no_overlap(kOperation, outputs, inputs);

  const std::int64_t query_len = out.size(1);
  const std::int64_t num_heads = out.size(2);
  const std::int64_t value_dim = out.size(3);
  // Taken before the first row is written, so that a failure leaves all of them as they were.
  const std::size_t parts_bytes = round_up(outs.size() * sizeof(PartialRow), 64);
  const std::size_t room =
      parts_bytes + round_up(static_cast<std::size_t>(value_dim) * sizeof(double), 64);
  const Workspace workspace(
      context.impl().workspaces(),
      saturating_product(static_cast<std::size_t>(context.num_threads()), room));
  parallel_for(context, out.size(0) * query_len, [&](std::int64_t task, int worker) {
    const std::int64_t batch = task / query_len;
    const std::int64_t token = task % query_len;
    std::byte* memory = workspace.data() + static_cast<std::size_t>(worker) * room;
    const std::span<PartialRow> parts(reinterpret_cast<PartialRow*>(memory), outs.size());
    auto* sums = reinterpret_cast<double*>(memory + parts_bytes);
    for (std::int64_t head = 0; head < num_heads; ++head) {
      for (std::size_t i = 0; i < parts.size(); ++i) {
        parts[i] = {
            element_at(outs[i].data(), outs[i].dtype(), offset_of(outs[i], {batch, token, head})),
            outs[i].dtype(),
            load_element(lses[i].data(), lses[i].dtype(),
                         offset_of(lses[i], {batch, head, token}))};
      }
      double sink = 0;
      if (!sinks.absent()) sink = load_element(sinks.data(), sinks.dtype(), head * sinks.stride(0));
      void* const row = element_at(out.data(), out.dtype(), offset_of(out, {batch, token, head}));
      const double merged =
          merge_rows(parts, value_dim, sinks.absent() ? nullptr : &sink, sums, row, out.dtype());
      if (lse.absent()) continue;
      store_element(lse.data(), lse.dtype(), offset_of(lse, {batch, head, token}), merged);
    }
  });
}

}  // namespace ladon
