// One attention problem as every backend sees it: plain data, validated, nothing owned.
//
// Strides are in elements. Rows of the score matrix of one KV head are pairs (token, head of the
// group), token-major: all query heads that share a KV head share each read of K and V.
#pragma once

#include <cstdint>

#include "ladon/dtype.h"

namespace ladon {

/// A [token, head, dim] array of one sequence, reached from the call's base pointer.
struct Operand {
  void* data = nullptr;  // null where the tensor is absent
  DType dtype = DType::kF32;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
};

/// A [sequence, head, query, key] array; a stride of 0 where the dimension is broadcast.
struct BroadcastOperand {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  std::int64_t sequence_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t query_stride = 0;
  std::int64_t key_stride = 0;
};

/// The natural logs of the softmax denominators (or their gradients).
struct LseOperand {
  void* data = nullptr;
  bool is_f64 = false;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
};

/// Everything that turns q.k into a weight, in the order in which it is applied.
struct ScoreRules {
  double scale = 1;
  double softcap = 0;                    // 0: off
  const double* alibi_slopes = nullptr;  // [num_heads]
  BroadcastOperand bias;
  BroadcastOperand mask;  // bytes, 0 = masked
  // A query at position p sees keys [p - window_left, p + window_right]. Causal is window_right =
  // 0. kNoWindow where there is no limit.
  std::int64_t window_left = 0;
  std::int64_t window_right = 0;
  const double* sinks = nullptr;  // [num_heads]
  // A weight is dropped when its random word is below dropout_threshold = probability * 2^32.
  bool dropout = false;
  std::uint32_t dropout_threshold = 0;
  double dropout_scale = 1;  // 1 / (1 - probability)
  std::uint64_t dropout_seed = 0;
};

/// Larger than any length, small enough that sums of a few of them do not overflow.
inline constexpr std::int64_t kNoWindow = std::int64_t{1} << 60;

struct Sequence {
  std::int64_t index = 0;          // which entry of mask and bias
  std::int64_t dropout_index = 0;  // the number that dropout knows it by
  std::int64_t query_len = 0;
  std::int64_t kv_len = 0;           // keys that exist; padding is not counted
  std::int64_t position_offset = 0;  // query i stands at position i + position_offset
  // Offsets of this sequence's first element from the operands' data.
  std::int64_t q = 0;
  std::int64_t k = 0;
  std::int64_t v = 0;
  std::int64_t out = 0;
  std::int64_t lse = 0;
  std::int64_t dout = 0;
  std::int64_t dlse = 0;
  std::int64_t dq = 0;
  std::int64_t dk = 0;
  std::int64_t dv = 0;
};

struct AttentionParams {
  std::int64_t num_sequences = 0;
  std::int64_t num_heads = 0;
  std::int64_t num_kv_heads = 0;
  std::int64_t group = 1;  // num_heads / num_kv_heads
  std::int64_t head_dim = 0;
  std::int64_t value_dim = 0;
  const Sequence* sequences = nullptr;
  ScoreRules rules;
  Operand q;
  Operand k;
  Operand v;
  Operand out;
  LseOperand lse;
  // Backward only.
  Operand dout;
  LseOperand dlse;
  Operand dq;
  Operand dk;
  Operand dv;
};

}  // namespace ladon
