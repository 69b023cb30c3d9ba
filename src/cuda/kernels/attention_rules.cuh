// What turns q.k into a score, and where keys and values are: shared by every attention kernel, so
// that forward, backward and attention_weights() cannot differ.
//
// AttentionParams are on the device here: Sequence::pages are device pointers.
#pragma once

#include <cstdint>

#include "core/attention_params.h"
#include "core/philox.h"
#include "cuda/kernels/element.cuh"

namespace ladon::cuda {

/// The slot that stores a key, by page table, in a ring or in order.
__device__ inline std::int64_t kv_slot(const KvLayout& layout, const Sequence& sequence,
                                       std::int64_t key) {
  if (layout.page_size != 0) {
    const std::int64_t page = sequence.pages[key / layout.page_size];
    return page * layout.page_size + key % layout.page_size;
  }
  if (layout.ring_slots != 0) {
    return sequence.first_slot + (sequence.ring_start + key) % layout.ring_slots;
  }
  return sequence.first_slot + key;
}

/// One query row of the score matrix.
struct QueryRow {
  std::int64_t token = 0;
  std::int64_t head = 0;
};

__device__ inline std::int64_t broadcast_index(const BroadcastOperand& operand,
                                               const Sequence& sequence, const QueryRow& row,
                                               std::int64_t key) {
  return sequence.index * operand.sequence_stride + row.head * operand.head_stride +
         row.token * operand.query_stride + key * operand.key_stride;
}

/// The keys that a query may see by its window: [begin, end).
struct KeyRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};
__device__ inline KeyRange window_of(const ScoreRules& rules, const Sequence& sequence,
                                     std::int64_t token) {
  const std::int64_t position = token + sequence.position_offset;
  const std::int64_t begin = position - rules.window_left;
  const std::int64_t end = position + rules.window_right + 1;
  // Both within the keys, however far from them the position is: kernels count keys in 32 bits.
  const auto within = [&](std::int64_t key) {
    return key < 0 ? 0 : key > sequence.kv_len ? sequence.kv_len : key;
  };
  return {within(begin), within(end)};
}

/// Whether scores have no rules but their scale and the window. On the host.
inline bool only_scale_and_window(const ScoreRules& rules) {
  return rules.softcap == 0 && rules.alibi_slopes.data == nullptr && rules.bias.data == nullptr &&
         rules.mask.data == nullptr && !rules.dropout;
}

/// Softcap: what it makes of scale * q.k, and the derivative. A cap past the range of Compute has
/// no effect; one too small for 1 / cap is that range's smallest.
template <class Compute>
class Softcap {
 public:
  __device__ explicit Softcap(const ScoreRules& rules) {
    constexpr double kLargestCap = sizeof(Compute) == 8 ? 1e300 : 1e30;
    if (rules.softcap == 0 || rules.softcap >= kLargestCap) return;
    cap_ = static_cast<Compute>(rules.softcap < 1 / kLargestCap ? 1 / kLargestCap : rules.softcap);
    if constexpr (sizeof(Compute) == 8) {
      inverse_ = 1 / cap_;
    } else {
      inverse_ = __fdividef(1, cap_);  // without code for what is out of range
    }
  }

  __device__ bool is_on() const { return cap_ != 0; }

  /// Where it is on.
  __device__ Compute score(Compute scaled) const { return cap_ * tanh(scaled * inverse_); }
  __device__ Compute slope(Compute scaled) const {
    // 4 e / (1 + e)^2: 1 - tanh^2 would cancel where tanh is near 1.
    const Compute e = exp(-2 * fabs(scaled * inverse_));
    return 4 * e / ((1 + e) * (1 + e));
  }

 private:
  Compute cap_ = 0;
  Compute inverse_ = 0;
};

/// A score after softcap, if there is one, and its derivative with respect to scale * q.k.
template <class Compute>
struct Softcapped {
  Compute score;
  Compute slope;
};
template <class Compute>
__device__ inline Softcapped<Compute> softcapped(const ScoreRules& rules, Compute scaled) {
  const Softcap<Compute> softcap(rules);
  if (!softcap.is_on()) return {scaled, 1};
  return {softcap.score(scaled), softcap.slope(scaled)};
}

/// Adds ALiBi and bias to a softcapped score and masks it: -inf where the query may not see the
/// key. Memory of masked keys may hold anything; the score that came in is not used then.
template <class Compute>
__device__ inline Compute masked_score(const ScoreRules& rules, const Sequence& sequence,
                                       const QueryRow& row, std::int64_t key, Compute score) {
  const std::int64_t distance = key - (row.token + sequence.position_offset);
  const Compute masked = -static_cast<Compute>(INFINITY);
  if (key >= sequence.kv_len || -distance > rules.window_left || distance > rules.window_right) {
    return masked;
  }
  if (rules.mask.data != nullptr &&
      static_cast<const unsigned char*>(
          rules.mask.data)[broadcast_index(rules.mask, sequence, row, key)] == 0) {
    return masked;
  }
  if (rules.alibi_slopes.data != nullptr) {
    const Compute slope = load_element<Compute>(rules.alibi_slopes.data, rules.alibi_slopes.dtype,
                                                row.head * rules.alibi_slopes.stride);
    score -= slope * static_cast<Compute>(distance < 0 ? -distance : distance);
  }
  if (rules.bias.data != nullptr) {
    const Compute bias = load_element<Compute>(rules.bias.data, rules.bias.dtype,
                                               broadcast_index(rules.bias, sequence, row, key));
    if (bias == masked) return masked;  // even where the score is NaN
    score += bias;
  }
  return score;
}

/// What dropout multiplies a weight with: 0, or 1 / (1 - probability).
template <class Compute>
__device__ inline Compute dropout_factor(const ScoreRules& rules, const Sequence& sequence,
                                         const QueryRow& row, std::int64_t key) {
  if (!rules.dropout) return 1;
  key += rules.dropout_key;
  const PhiloxBlock block =
      dropout_block(rules.dropout_seed, sequence.dropout_index, rules.dropout_head + row.head,
                    rules.dropout_query + row.token, key);
  return block.words[key % 4] < rules.dropout_threshold ? Compute{0}
                                                        : static_cast<Compute>(rules.dropout_scale);
}

}  // namespace ladon::cuda
