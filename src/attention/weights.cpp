// attention_weights(): the score matrix at any stage, row by row from the reference.

#include <limits>
#include <string>

#include "attention/problem.h"
#include "attention/validate.h"
#include "core/element.h"
#include "core/fail.h"
#include "core/parallel.h"
#include "ladon/attention.h"
#include "reference/attention_reference.h"

namespace ladon {
namespace {

double at_stage(const reference::ScoreRow& row, std::size_t key, ScoreStage stage) {
  switch (stage) {
    case ScoreStage::kScaled: return row.scaled[key];
    case ScoreStage::kSoftcapped: return row.softcapped[key];
    case ScoreStage::kMasked: return row.masked[key];
    case ScoreStage::kProbability: return row.probability[key];
    case ScoreStage::kDropped: return row.probability[key] * row.keep[key];
  }
  return 0;
}

}  // namespace

void attention_weights(const Context& context, const ConstTensorView& q, const ConstTensorView& k,
                       const AttentionOptions& options, const TensorView& weights,
                       ScoreStage stage) {
  constexpr std::string_view kOperation = "attention_weights";
  const Problem problem(context, kOperation, q, k, {}, options);
  const AttentionSizes& sizes = problem.sizes();
  if (sizes.packed) {
    fail(ErrorCode::kUnsupported, kOperation, "query_offsets",
         "got a packed batch, expected one sequence at a time or a padded batch");
  }
  if (stage > ScoreStage::kDropped) {
    fail(kOperation, "stage",
         "got " + std::to_string(static_cast<int>(stage)) + ", expected a ScoreStage");
  }
  const NamedView output{"weights", weights};
  check_strided_floats(kOperation, output,
                       {sizes.batch, sizes.num_heads, sizes.query_len, sizes.kv_len});
  const NamedView inputs[] = {{"q", q},
                              {"k", k},
                              {"mask", options.mask},
                              {"bias", options.bias},
                              {"alibi_slopes", options.alibi_slopes},
                              {"sinks", options.sinks}};
  check_no_overlap(kOperation, {&output, 1}, inputs);

  const AttentionParams& params = problem.params();
  const double padding =
      stage == ScoreStage::kMasked ? -std::numeric_limits<double>::infinity() : 0;
  parallel_for(
      context, sizes.batch * sizes.num_heads * sizes.query_len, [&](std::int64_t task, int) {
        const std::int64_t token = task % sizes.query_len;
        const std::int64_t head = task / sizes.query_len % sizes.num_heads;
        const std::int64_t batch = task / sizes.query_len / sizes.num_heads;
        const Sequence& sequence = params.sequences[batch];
        const reference::ScoreRow row = reference::score_row(params, sequence, head, token);
        const std::int64_t start = offset_of(weights, {batch, head, token});
        for (std::int64_t key = 0; key < sizes.kv_len; ++key) {
          const double value =
              key < sequence.kv_len ? at_stage(row, static_cast<std::size_t>(key), stage) : padding;
          store_element(weights.data(), weights.dtype(), start + key * weights.stride(3), value);
        }
      });
}

}  // namespace ladon
