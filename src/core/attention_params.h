// One attention call as every backend sees it: plain data, validated, nothing owned.
//
// Tensors are pointers into the backend's own memory; what describes them (sequences, page tables)
// is host memory. Strides are in elements. Rows of the score matrix of one KV head are pairs
// (token, head of the group), token-major: all query heads that share a KV head share each read of
// K and V.
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

/// One element for each query head, any float dtype.
struct HeadOperand {
  void* data = nullptr;  // null where it is absent
  DType dtype = DType::kF32;
  std::int64_t stride = 0;
};

/// The gradient of a bias, [sequence, head, query, key]; any of the sizes may be 1.
struct BiasGradient {
  void* data = nullptr;
  DType dtype = DType::kF32;
  std::int64_t sizes[4] = {};
  std::int64_t strides[4] = {};
};

/// How a cache stores the keys and values of a sequence: token `key` is in a slot, and slots are
/// token_stride apart. Plain tensors use none of it: their slot is the key.
struct KvLayout {
  // Paged: page Sequence::pages[i] holds tokens [i * page_size, (i + 1) * page_size), in the slots
  // from pages[i] * page_size on. 0: not paged.
  std::int64_t page_size = 0;
  // Ring: key j is in slot first_slot + (Sequence::ring_start + j) % ring_slots. 0: not a ring.
  std::int64_t ring_slots = 0;
  // Quantised elements are dequantised with one f32 scale per (slot, head). Null: not quantised.
  const float* k_scales = nullptr;
  const float* v_scales = nullptr;
  std::int64_t scale_slot_stride = 0;
  std::int64_t scale_head_stride = 0;

  bool plain() const { return page_size == 0 && ring_slots == 0 && k_scales == nullptr; }
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
  double softcap = 0;  // 0: off
  HeadOperand alibi_slopes;
  BroadcastOperand bias;
  BroadcastOperand mask;  // bytes, 0 = masked
  // A query at position p sees keys [p - window_left, p + window_right]. Causal is window_right =
  // 0. kNoWindow where there is no limit.
  std::int64_t window_left = 0;
  std::int64_t window_right = 0;
  HeadOperand sinks;
  // A weight is dropped when its random word is below dropout_threshold = probability * 2^32.
  bool dropout = false;
  std::uint32_t dropout_threshold = 0;
  double dropout_scale = 1;  // 1 / (1 - probability)
  std::uint64_t dropout_seed = 0;
  // The indices of this call's first head, query and key in the random stream of dropout.
  std::int64_t dropout_head = 0;
  std::int64_t dropout_query = 0;
  std::int64_t dropout_key = 0;
};

/// Larger than any length, small enough that sums of a few of them do not overflow.
inline constexpr std::int64_t kNoWindow = std::int64_t{1} << 60;

struct Sequence {
  std::int64_t index = 0;          // which entry of mask and bias
  std::int64_t dropout_index = 0;  // the number that dropout knows it by
  std::int64_t query_len = 0;
  std::int64_t kv_len = 0;           // keys that exist; padding is not counted
  std::int64_t position_offset = 0;  // query i has position i + position_offset
  // Where a cache holds its keys and values, see KvLayout.
  const std::int32_t* pages = nullptr;
  std::int64_t first_slot = 0;
  std::int64_t ring_start = 0;
  std::int64_t key_origin = 0;  // tokens before key 0, which a window has dropped
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

/// A call may compute a part of a larger problem: some of a sequence's queries, or some of the
/// heads that share a KV head. A CPU divides its work by row counts; it then goes by those of the
/// whole, so that a part has the bits of the whole. 0: as the call itself.
struct WholeProblem {
  std::int64_t query_len = 0;
  std::int64_t first_query = 0;  // of the part, in the whole
  std::int64_t group = 0;
};

struct AttentionParams {
  std::int64_t num_sequences = 0;
  std::int64_t num_heads = 0;
  std::int64_t num_kv_heads = 0;
  std::int64_t group = 1;  // num_heads / num_kv_heads
  std::int64_t head_dim = 0;
  std::int64_t value_dim = 0;
  std::int64_t max_query_len = 0;  // of any sequence
  std::int64_t max_kv_len = 0;     // of any sequence, padding included
  const Sequence* sequences = nullptr;
  WholeProblem whole;
  ScoreRules rules;
  Operand q;
  Operand k;
  Operand v;
  KvLayout kv_layout;
  Operand out;
  LseOperand lse;
  // Backward only; gradients that are absent are not wanted.
  Operand dout;
  LseOperand dlse;
  Operand dq;
  Operand dk;
  Operand dv;
  // Keys of dk and dv in each sequence of a padded batch: those past kv_len are set to 0. 0 in a
  // packed batch, which has no padding.
  std::int64_t padded_kv_len = 0;
  BiasGradient dbias;
  HeadOperand dsinks;
};

/// The score matrix of attention_weights(): [sequence, head, query, key].
struct WeightsOperand {
  void* data = nullptr;
  DType dtype = DType::kF32;
  std::int64_t strides[4] = {};
};

}  // namespace ladon
