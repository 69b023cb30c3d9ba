// Attention in plain double loops: the truth that every kernel is tested against, and what runs
// when LADON_ISA=reference. Written for reading, not for speed; it shares no arithmetic with the
// kernels.
#pragma once

#include <cstdint>
#include <vector>

#include "core/attention_params.h"
#include "core/parallel.h"

namespace ladon::reference {

/// One row of the score matrix, key by key, at every stage of the contract.
struct ScoreRow {
  std::vector<double> scaled;       // scale * q.k
  std::vector<double> softcapped;   // after softcap
  std::vector<double> masked;       // after ALiBi and bias; -inf where masked
  std::vector<double> probability;  // after softmax; 0 where masked
  std::vector<double> keep;         // dropout's factor: 0 or 1 / (1 - probability)
  double lse = 0;                   // -inf where nothing is visible
  double maximum = 0;               // of the visible scores and the sink
  double denominator = 0;           // relative to the maximum
  double size = 0;  // the largest scale * sum(|q| * |k|) + |ALiBi term| of a visible key
};

/// Scores of query `token` and query head `head` with all keys of the sequence.
ScoreRow score_row(const AttentionParams& params, const Sequence& sequence, std::int64_t head,
                   std::int64_t token);

/// Writes out and lse of one query token and head.
void forward_row(const AttentionParams& params, const Sequence& sequence, std::int64_t head,
                 std::int64_t token);

/// Writes dq, dk and dv of one KV head of one sequence, from the saved out and lse. Stops between
/// two rows where the check says so.
void backward(const AttentionParams& params, const Sequence& sequence, std::int64_t kv_head,
              InterruptCheck& interrupt);

/// The gradient of one row's biased scores, key by key.
std::vector<double> score_gradient_row(const AttentionParams& params, const Sequence& sequence,
                                       std::int64_t head, std::int64_t token);

/// The gradient of one head's sink. Stops between two rows where the check says so.
double sink_gradient(const AttentionParams& params, std::int64_t head, InterruptCheck& interrupt);

/// Zeros in dk and dv for the padding of a batch: keys that exist there and were never seen.
void zero_padding(const AttentionParams& params);

}  // namespace ladon::reference
