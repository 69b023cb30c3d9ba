// compare_layers(): what a conversion lost, on inputs.
#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "convert/eval_layer.h"
#include "core/checks.h"
#include "core/fail.h"
#include "ladon/convert.h"

namespace ladon {
namespace {

constexpr std::string_view kOperation = "compare_layers";
// Rows of attention weights grow with the square of the length.
constexpr std::int64_t kWeightPositions = 256;

struct SquareSums {
  double differences = 0;
  double values = 0;
  double error() const {
    return differences == 0 ? 0 : std::sqrt(differences / values);  // inf where nothing was there
  }
};

Tensor to_f64(const Context& context, const Tensor& tensor) {
  return Tensor::copy_of(context, tensor, DType::kF64).to_host();
}

/// Sums over one sequence, [seq, embed_dim] each, from row `first` on.
void add_outputs(const Tensor& before, const Tensor& after, std::int64_t first, SquareSums& sums) {
  const auto* const a = before.data_as<double>();
  const auto* const b = after.data_as<double>();
  for (std::int64_t i = first * before.size(1); i < before.num_elements(); ++i) {
    sums.differences += (a[i] - b[i]) * (a[i] - b[i]);
    sums.values += a[i] * a[i];
  }
}

Tensor weights_of(const Context& context, const AttentionLayer& layer, const ConstTensorView& x) {
  Tensor weights(context, DType::kF64, {1, layer.num_heads(), x.size(0), x.size(0)});
  layer.forward(context, LayerInputs{.query = x}, LayerCall{.weights = weights});
  return weights.to_host();
}

/// The sum of KL(before | after) over heads and rows.
double divergence(const Tensor& before, const Tensor& after,
                  std::span<const std::int64_t> head_order) {
  const std::int64_t per_head = before.size(2) * before.size(3);
  double sum = 0;
  for (std::int64_t h = 0; h < before.size(1); ++h) {
    const std::int64_t source = head_order.empty() ? h : head_order[static_cast<std::size_t>(h)];
    const auto* const p = before.data_as<double>() + source * per_head;
    const auto* const q = after.data_as<double>() + h * per_head;
    for (std::int64_t i = 0; i < per_head; ++i) {
      if (p[i] > 0) sum += p[i] * (std::log(p[i]) - std::log(std::max(q[i], 1e-300)));
    }
  }
  return sum;
}

void check_head_order(std::span<const std::int64_t> head_order, std::int64_t num_heads) {
  if (head_order.empty()) return;
  std::vector<std::int64_t> sorted(head_order.begin(), head_order.end());
  std::sort(sorted.begin(), sorted.end());
  for (std::size_t n = 0; n < sorted.size(); ++n) {
    if (std::cmp_equal(sorted.size(), num_heads) && std::cmp_equal(sorted[n], n)) continue;
    fail(kOperation, "head_order",
         "got " + std::to_string(sorted.size()) + " heads, expected each of " +
             std::to_string(num_heads) + " once");
  }
}

}  // namespace

std::int64_t cache_elements(const AttentionLayer& layer) {
  const KvCacheOptions options = layer.cache_options();
  const std::int64_t value_dim = options.value_dim == 0 ? options.head_dim : options.value_dim;
  return options.num_kv_heads * (options.head_dim + (options.values_in_keys ? 0 : value_dim));
}

LayerComparison compare_layers(const Context& context, const AttentionLayer& before,
                               const AttentionLayer& after, const ConstTensorView& x,
                               std::span<const std::int64_t> head_order) {
  if (before.embed_dim() != after.embed_dim()) {
    fail(kOperation, "after",
         "got an embed_dim of " + std::to_string(after.embed_dim()) + ", expected " +
             std::to_string(before.embed_dim()) + " as before");
  }
  if (before.num_heads() != after.num_heads()) {
    fail(kOperation, "after",
         "got " + std::to_string(after.num_heads()) + " query heads, expected " +
             std::to_string(before.num_heads()) + " as before");
  }
  check_head_order(head_order, before.num_heads());
  const Operation operation(kOperation, context);
  check_device(operation, "before", before.device());
  check_device(operation, "after", after.device());
  check_device(operation, {"x", x});
  check_present(kOperation, {"x", x});
  if ((x.rank() != 2 && x.rank() != 3) || x.size(x.rank() - 1) != before.embed_dim() ||
      x.num_elements() == 0) {
    fail(kOperation, "x",
         got_shape(x) + ", expected [seq, " + std::to_string(before.embed_dim()) +
             "] or [batch, seq, " + std::to_string(before.embed_dim()) + "], and tokens");
  }
  const convert::EvalLayer source(before);
  const convert::EvalLayer target(after);
  SquareSums all;
  SquareSums after_first;
  double divergences = 0;
  double rows = 0;
  const std::int64_t sequences = x.rank() == 3 ? x.size(0) : 1;
  for (std::int64_t n = 0; n < sequences; ++n) {
    const ConstTensorView sequence = x.rank() == 3 ? x.select(0, n) : x;
    const Tensor expected = to_f64(context, source->forward(context, sequence));
    const Tensor got = to_f64(context, target->forward(context, sequence));
    add_outputs(expected, got, 0, all);
    add_outputs(expected, got, 1, after_first);
    const ConstTensorView start =
        sequence.slice(0, 0, std::min(sequence.size(0), kWeightPositions));
    divergences += divergence(weights_of(context, *source, start),
                              weights_of(context, *target, start), head_order);
    rows += static_cast<double>(before.num_heads() * start.size(0));
  }
  return {.output_error = all.error(),
          .output_error_after_first = after_first.error(),
          .weights_divergence = divergences / rows,
          .cache_before = cache_elements(before),
          .cache_after = cache_elements(after)};
}

}  // namespace ladon
