// attention_weights(): the score matrix itself, at any stage. For looking at, not for speed.
//
// A block of 128 threads has a row (sequence, head, query), and its threads every 128th key. Scores
// are computed in double where they are needed, once for the softmax's maximum and sum and once for
// the result, because the result's dtype may not hold them. Per score: head_dim multiplications and
// additions, twice. The limit is f64 arithmetic and conversions.

#include <cmath>
#include <cstdint>
#include <limits>

#include "cuda/kernels/attention_rules.cuh"
#include "cuda/kernels/chunk.cuh"
#include "cuda/kernels/grid.cuh"
#include "cuda/kernels/reduce.cuh"
#include "cuda/operations.h"
#include "cuda/sequences.h"
#include "ladon/attention.h"

namespace ladon::cuda {
namespace {

constexpr int kRowThreads = 128;

struct WeightsParams {
  AttentionParams attention;
  ScoreStage stage;
  WeightsOperand weights;
};

/// scale * q.k.
__device__ inline double scaled_score(const AttentionParams& params, const Sequence& sequence,
                                      const QueryRow& row, std::int64_t key) {
  const std::int64_t q =
      sequence.q + row.token * params.q.token_stride + row.head * params.q.head_stride;
  const std::int64_t k = sequence.k +
                         kv_slot(params.kv_layout, sequence, key) * params.k.token_stride +
                         row.head / params.group * params.k.head_stride;
  double dot = 0;
  for (std::int64_t i = 0; i < params.head_dim; i += kChunk) {
    const int count = chunk_count(params.head_dim, i);
    const Chunk<double> a = load_chunk<double>(params.q.data, params.q.dtype, q + i, count);
    const Chunk<double> b = load_chunk<double>(params.k.data, params.k.dtype, k + i, count);
#pragma unroll
    for (int n = 0; n < kChunk; ++n) dot = fma(a.values[n], b.values[n], dot);
  }
  return params.rules.scale * dot;
}

/// With every rule applied; -inf where the query may not see the key.
__device__ inline double final_score(const AttentionParams& params, const Sequence& sequence,
                                     const QueryRow& row, std::int64_t key) {
  const double scaled = scaled_score(params, sequence, row, key);
  return masked_score(params.rules, sequence, row, key, softcapped(params.rules, scaled).score);
}

/// The softmax of a row: exp(score - maximum) / sum.
struct Softmax {
  double maximum = -std::numeric_limits<double>::max();
  double sum = 0;
  bool sees_something = false;

  __device__ void add(double score) {
    if (score == -INFINITY) return;
    sees_something = true;
    if (score > maximum) {
      sum *= exp(maximum - score);
      maximum = score;
    }
    sum += exp(score - maximum);
  }

  /// All threads' together. Called by the whole block.
  __device__ void combine() {
    const double largest = largest_of_threads(maximum, kRowThreads);
    sum = sum_of_threads(sees_something ? sum * exp(maximum - largest) : 0, kRowThreads);
    maximum = largest;
    sees_something = __syncthreads_or(sees_something);
  }

  __device__ void add_sink(double sink) {
    if (sink > maximum) {
      sum *= exp(maximum - sink);
      maximum = sink;
    }
    sum += exp(sink - maximum);
  }

  /// 0 for what is masked, but NaN where the row is.
  __device__ double probability(double score) const {
    if (!sees_something) return 0;
    return (score == -INFINITY ? 0 : exp(score - maximum)) / sum;
  }
};

__device__ inline Softmax softmax_of(const AttentionParams& params, const Sequence& sequence,
                                     const QueryRow& row) {
  Softmax softmax;
  for (std::int64_t key = threadIdx.x; key < sequence.kv_len; key += kRowThreads) {
    softmax.add(final_score(params, sequence, row, key));
  }
  softmax.combine();
  const HeadOperand& sinks = params.rules.sinks;
  if (sinks.data != nullptr && softmax.sees_something) {
    softmax.add_sink(load_element<double>(sinks.data, sinks.dtype, row.head * sinks.stride));
  }
  return softmax;
}

__device__ inline double at_stage(const WeightsParams& params, const Sequence& sequence,
                                  const QueryRow& row, std::int64_t key, const Softmax& softmax) {
  const ScoreRules& rules = params.attention.rules;
  const double scaled = scaled_score(params.attention, sequence, row, key);
  if (params.stage == ScoreStage::kScaled) return scaled;
  const double capped = softcapped(rules, scaled).score;
  if (params.stage == ScoreStage::kSoftcapped) return capped;
  const double score = masked_score(rules, sequence, row, key, capped);
  if (params.stage == ScoreStage::kMasked) return score;
  const double probability = softmax.probability(score);
  if (params.stage == ScoreStage::kProbability) return probability;
  return probability * dropout_factor<double>(rules, sequence, row, key);
}

__global__ void __launch_bounds__(kRowThreads)
    weights_of_rows(const __grid_constant__ WeightsParams params) {
  const AttentionParams& attention = params.attention;
  const WeightsOperand& weights = params.weights;
  const std::int64_t rows = attention.num_sequences * attention.num_heads * attention.max_query_len;
  const double padding = params.stage == ScoreStage::kMasked ? -INFINITY : 0;
  for (std::int64_t number = blockIdx.x; number < rows; number += gridDim.x) {
    const QueryRow row{number % attention.max_query_len,
                       number / attention.max_query_len % attention.num_heads};
    const std::int64_t index = number / attention.max_query_len / attention.num_heads;
    const Sequence sequence = attention.sequences[index];
    Softmax softmax;
    if (params.stage >= ScoreStage::kProbability) softmax = softmax_of(attention, sequence, row);
    const std::int64_t start =
        index * weights.strides[0] + row.head * weights.strides[1] + row.token * weights.strides[2];
    for (std::int64_t key = threadIdx.x; key < attention.max_kv_len; key += kRowThreads) {
      const double value =
          key < sequence.kv_len ? at_stage(params, sequence, row, key, softmax) : padding;
      store_element(weights.data, weights.dtype, start + key * weights.strides[3], value);
    }
  }
}

}  // namespace

void attention_weights(Queue& queue, const AttentionParams& params, ScoreStage stage,
                       const WeightsOperand& weights) {
  const std::int64_t rows = params.num_sequences * params.num_heads * params.max_query_len;
  if (rows == 0 || params.max_kv_len == 0) return;
  const DeviceSequences sequences(queue, params);
  queue.launch(weights_of_rows, Grid{blocks_for(rows, 1), kRowThreads},
               WeightsParams{sequences.params(), stage, weights});
}

}  // namespace ladon::cuda
