// The attention operations of the reference backend: loops over sequences and heads.

#include <cstring>
#include <limits>
#include <vector>

#include "core/element.h"
#include "core/parallel.h"
#include "reference/attention_reference.h"
#include "reference/backend.h"

namespace ladon::reference {
namespace {

void zero_keys(const Operand& operand, std::int64_t start, std::int64_t first, std::int64_t end,
               std::int64_t heads, std::int64_t dim) {
  if (operand.data == nullptr) return;
  const std::size_t bytes = static_cast<std::size_t>(dim) * size_of(operand.dtype);
  for (std::int64_t key = first; key < end; ++key) {
    for (std::int64_t head = 0; head < heads; ++head) {
      const std::int64_t at = start + key * operand.token_stride + head * operand.head_stride;
      std::memset(element_at(operand.data, operand.dtype, at), 0, bytes);
    }
  }
}

/// Plain and whole: the reference may hold the gradient once more in double.
void write_bias_gradient(const AttentionParams& params, InterruptCheck& interrupt) {
  const BiasGradient& dbias = params.dbias;
  std::int64_t steps[4] = {};  // of the sums; 0 where the dimension is shared
  std::int64_t count = 1;
  for (int dim = 3; dim >= 0; --dim) {
    steps[dim] = dbias.sizes[dim] == 1 ? 0 : count;
    count *= dbias.sizes[dim];
  }
  std::vector<double> sums(static_cast<std::size_t>(count));
  for (std::int64_t s = 0; s < params.num_sequences; ++s) {
    const Sequence& sequence = params.sequences[s];
    for (std::int64_t head = 0; head < params.num_heads; ++head) {
      for (std::int64_t token = 0; token < sequence.query_len; ++token) {
        if (interrupt.stops()) return;
        const std::vector<double> row = score_gradient_row(params, sequence, head, token);
        const std::int64_t start = s * steps[0] + head * steps[1] + token * steps[2];
        for (std::int64_t key = 0; key < sequence.kv_len; ++key) {
          sums[static_cast<std::size_t>(start + key * steps[3])] +=
              row[static_cast<std::size_t>(key)];
        }
      }
    }
  }
  for (std::int64_t i = 0; i < count; ++i) {
    std::int64_t offset = 0;
    std::int64_t index = i;
    for (int dim = 3; dim >= 0; --dim) {
      offset += index % dbias.sizes[dim] * dbias.strides[dim];
      index /= dbias.sizes[dim];
    }
    store_element(dbias.data, dbias.dtype, offset, sums[static_cast<std::size_t>(i)]);
  }
}

double at_stage(const ScoreRow& row, std::size_t key, ScoreStage stage) {
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

void zero_padding(const AttentionParams& params) {
  for (std::int64_t s = 0; s < params.num_sequences; ++s) {
    const Sequence& sequence = params.sequences[s];
    zero_keys(params.dk, sequence.dk, sequence.kv_len, params.padded_kv_len, params.num_kv_heads,
              params.head_dim);
    zero_keys(params.dv, sequence.dv, sequence.kv_len, params.padded_kv_len, params.num_kv_heads,
              params.value_dim);
  }
}

void ReferenceBackend::attend(const AttentionParams& params) {
  const std::int64_t rows = params.num_sequences * params.num_heads * params.max_query_len;
  interruptible_for(workers(), rows, [&](std::int64_t task, int) {
    const std::int64_t token = task % params.max_query_len;
    const std::int64_t head = task / params.max_query_len % params.num_heads;
    const Sequence& sequence = params.sequences[task / params.max_query_len / params.num_heads];
    if (token < sequence.query_len) forward_row(params, sequence, head, token);
  });
}

void ReferenceBackend::attend_backward(const AttentionParams& params) {
  zero_padding(params);
  InterruptCheck interrupt(workers());
  parallel_for(workers(), params.num_sequences * params.num_kv_heads, [&](std::int64_t task, int) {
    backward(params, params.sequences[task / params.num_kv_heads], task % params.num_kv_heads,
             interrupt);
  });
  if (params.dsinks.data != nullptr) {
    parallel_for(workers(), params.num_heads, [&](std::int64_t head, int) {
      store_element(params.dsinks.data, params.dsinks.dtype, head * params.dsinks.stride,
                    sink_gradient(params, head, interrupt));
    });
  }
  if (params.dbias.data != nullptr) write_bias_gradient(params, interrupt);
}

void ReferenceBackend::attention_weights(const AttentionParams& params, ScoreStage stage,
                                         const WeightsOperand& weights) {
  const double padding =
      stage == ScoreStage::kMasked ? -std::numeric_limits<double>::infinity() : 0;
  const std::int64_t rows = params.num_sequences * params.num_heads * params.max_query_len;
  interruptible_for(workers(), rows, [&](std::int64_t task, int) {
    const std::int64_t token = task % params.max_query_len;
    const std::int64_t head = task / params.max_query_len % params.num_heads;
    const std::int64_t index = task / params.max_query_len / params.num_heads;
    const Sequence& sequence = params.sequences[index];
    const ScoreRow row = score_row(params, sequence, head, token);
    const std::int64_t start =
        index * weights.strides[0] + head * weights.strides[1] + token * weights.strides[2];
    for (std::int64_t key = 0; key < params.max_kv_len; ++key) {
      const double value =
          key < sequence.kv_len ? at_stage(row, static_cast<std::size_t>(key), stage) : padding;
      store_element(weights.data, weights.dtype, start + key * weights.strides[3], value);
    }
  });
}

}  // namespace ladon::reference
