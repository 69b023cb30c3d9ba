// The rules of scores beyond a scale and a window, for the tensor-core forward kernels: softcap,
// ALiBi, bias, mask and dropout of a thread's 32 scores of a block of 64 keys, which stay in
// registers.
//
// A thread has two rows, lane / 4 of the warp's 16 and the one 8 below, and of each group of 8 keys
// two columns: scores[n][e] is of row e / 2 and key 8 n + 2 (lane % 4) + e % 2.
//
// Which rules a call has is asked once a block, outside of loops that are unrolled: loads of masks
// and biases are in flight together. Where rows of them are aligned, two neighbours are one load;
// where not, or where some of the block's keys do not exist, a loop takes some of the scores at a
// time and rotates the registers. The generic kernel and Hopper's both use this code, so their bits
// are the same.
#pragma once

#include <cstdint>

#include "cuda/kernels/attention_rules.cuh"
#include "cuda/kernels/segment_size.cuh"

namespace ladon::cuda {

inline constexpr int kKeyGroups = kBlockKeys / 8;
inline constexpr int kScoresPerThread = kKeyGroups * 4;
using ThreadScores = float[kKeyGroups][4];

/// A thread's two rows, and the keys [begin, end) that their windows leave. Rows that do not exist
/// are of token 0 and see nothing.
struct ThreadRows {
  int token[2] = {};
  int head[2] = {};
  int begin[2] = {};
  int end[2] = {};

  /// Without an index into registers.
  __device__ __forceinline__ QueryRow query_of(int i) const {
    return {i == 0 ? token[0] : token[1], i == 0 ? head[0] : head[1]};
  }
  __device__ __forceinline__ bool sees(int i, int key) const {
    return key >= (i == 0 ? begin[0] : begin[1]) && key < (i == 0 ? end[0] : end[1]);
  }
};

class BlockRules {
 public:
  /// Of the block that starts with key `first`, which may be before the sequence's key 0. All lanes
  /// of a warp have the same.
  __device__ __forceinline__ BlockRules(const ScoreRules& rules, const Sequence& sequence,
                                        const ThreadRows& rows, int first, int lane)
      : rules_(rules), sequence_(sequence), rows_(rows), first_(first), lane_(lane) {}

  /// scale * q.k become scores, but for the window: of keys that a row does not see they are
  /// anything.
  __device__ __forceinline__ void apply(ThreadScores& scores) const {
    const Softcap<float> softcap(rules_);
    if (softcap.is_on()) {
      for_each(scores, [&](float& score, int, int) { score = softcap.score(score); });
    }
    if (rules_.alibi_slopes.data != nullptr) add_alibi(scores);
    if (rules_.bias.data != nullptr) {
      with_storage_type(rules_.bias.dtype, [&](auto zero) {
        combine<decltype(zero)>(scores, rules_.bias, [](float score, auto stored) {
          const float bias = to_float(stored);
          return bias == -INFINITY ? bias : score + bias;  // even where the score is NaN
        });
      });
    }
    if (rules_.mask.data != nullptr) {
      combine<unsigned char>(scores, rules_.mask, [](float score, unsigned char may_see) {
        return may_see == 0 ? -INFINITY : score;
      });
    }
  }

  /// Which of the thread's weights dropout keeps: bit 4 n + e is that of scores[n][e].
  __device__ __forceinline__ unsigned kept() const {
    const std::int64_t first = first_ + rules_.dropout_key;
    return first % 4 == 0 ? kept_of_quads(first) : kept_of_any(first);
  }
  /// The others become 0, or stay NaN. These are as they were: ForwardParams::kept_factor.
  __device__ __forceinline__ static void drop(ThreadScores& weights, unsigned kept) {
    for_each(weights, [&](float& weight, int n, int e) {
      weight *= (kept >> (n * 4 + e) & 1U) != 0 ? 1.0F : 0.0F;
    });
  }

 private:
  template <class Change>
  __device__ __forceinline__ static void for_each(ThreadScores& scores, const Change& change) {
#pragma unroll
    for (int n = 0; n < kKeyGroups; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) change(scores[n][e], n, e);
    }
  }

  /// The thread's first key in the block.
  __device__ __forceinline__ int own_key() const { return lane_ % 4 * 2; }

  __device__ __forceinline__ void add_alibi(ThreadScores& scores) const {
    const HeadOperand& slopes = rules_.alibi_slopes;
    float slope[2];
    float distance[2];  // of the thread's first key
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const QueryRow row = rows_.query_of(i);
      slope[i] = load_element<float>(slopes.data, slopes.dtype, row.head * slopes.stride);
      distance[i] =
          static_cast<float>(first_ + own_key() - (row.token + sequence_.position_offset));
    }
    // Distances below 2^24 are exact in floats.
    for_each(scores, [&](float& score, int n, int e) {
      score -= slope[e / 2] * fabsf(distance[e / 2] + static_cast<float>(n * 8 + e % 2));
    });
  }

  template <class Stored>
  struct alignas(2 * sizeof(Stored)) Pair {
    Stored first;
    Stored second;
  };

  /// Changes each score to with(score, its element of the operand).
  template <class Stored, class With>
  __device__ __forceinline__ void combine(ThreadScores& scores, const BroadcastOperand& operand,
                                          const With& with) const {
    const Stored* rows[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rows[i] = static_cast<const Stored*>(operand.data) +
                broadcast_index(operand, sequence_, rows_.query_of(i), first_ + own_key());
    }
    const auto addresses =
        reinterpret_cast<std::uintptr_t>(rows[0]) | reinterpret_cast<std::uintptr_t>(rows[1]);
    const bool is_paired = operand.key_stride == 1 && addresses % sizeof(Pair<Stored>) == 0 &&
                           first_ >= 0 && first_ + kBlockKeys <= sequence_.kv_len;
    if (__all_sync(0xffffffffU, is_paired)) {
      combine_pairs(scores, rows, with);
    } else {
      combine_each(scores, operand.key_stride, rows, with);
    }
  }

  /// Pairs of neighbours, from where the rows have the thread's first key.
  template <class Stored, class With>
  __device__ __forceinline__ static void combine_pairs(ThreadScores& scores,
                                                       const Stored* (&rows)[2], const With& with) {
    // More in flight would take too many registers.
    constexpr int kGroups = sizeof(Stored) <= 2 ? kKeyGroups : 8 / sizeof(Stored);
#pragma unroll 1
    for (int done = 0; done < kKeyGroups; done += kGroups) {
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const auto pair = *reinterpret_cast<const Pair<Stored>*>(rows[i] + n * 8);
          scores[n][i * 2] = with(scores[n][i * 2], pair.first);
          scores[n][i * 2 + 1] = with(scores[n][i * 2 + 1], pair.second);
        }
      }
      rotate<kGroups>(scores);
      rows[0] += kGroups * 8;
      rows[1] += kGroups * 8;
    }
  }
  /// Elements of any stride and alignment. What a row does not see is not read.
  template <class Stored, class With>
  __device__ __forceinline__ void combine_each(ThreadScores& scores, std::int64_t key_stride,
                                               const Stored* (&rows)[2], const With& with) const {
    constexpr int kGroups = 2;
    int key = first_ + own_key();
#pragma unroll 1
    for (int done = 0; done < kKeyGroups; done += kGroups) {
#pragma unroll
      for (int n = 0; n < kGroups; ++n, key += 8) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (rows_.sees(e / 2, key + e % 2)) {
            scores[n][e] = with(scores[n][e], rows[e / 2][e % 2 * key_stride]);
          }
        }
        rows[0] += 8 * key_stride;
        rows[1] += 8 * key_stride;
      }
      rotate<kGroups>(scores);
    }
  }
  /// The first kGroups groups become the last: loops that are not unrolled have no index into
  /// registers.
  template <int kGroups>
  __device__ __forceinline__ static void rotate(ThreadScores& scores) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float all[kKeyGroups];
#pragma unroll
      for (int n = 0; n < kKeyGroups; ++n) all[n] = scores[n][e];
#pragma unroll
      for (int n = 0; n < kKeyGroups; ++n) scores[n][e] = all[(n + kGroups) % kKeyGroups];
    }
  }

  /// Where random words of the block's keys come four by four, from `first` on. Two lanes have keys
  /// of the same four, in the same two rows: each computes the words of one row.
  __device__ __forceinline__ unsigned kept_of_quads(std::int64_t first) const {
    const bool is_odd = lane_ % 2 != 0;
    const QueryRow row = rows_.query_of(is_odd ? 1 : 0);
    unsigned own = 0;
#pragma unroll 2
    for (int n = 0; n < kKeyGroups; ++n) {
      const PhiloxBlock block = random_words(row, first + n * 8 + lane_ % 4 / 2 * 4);
#pragma unroll
      for (int w = 0; w < 4; ++w) own |= (is_kept(block.words[w]) ? 1U : 0U) << (n * 4 + w);
    }
    const unsigned other = __shfl_xor_sync(0xffffffffU, own, 1);
    constexpr unsigned kTwoOfFour = 0x33333333U;
    const int words = is_odd ? 2 : 0;  // the lane's own, of four
    const unsigned upper = (is_odd ? other : own) >> words & kTwoOfFour;
    const unsigned lower = (is_odd ? own : other) >> words & kTwoOfFour;
    return upper | lower << 2;
  }
  __device__ __forceinline__ unsigned kept_of_any(std::int64_t first) const {
    unsigned kept = 0;
#pragma unroll 1
    for (int i = 0; i < kScoresPerThread; ++i) {
      const std::int64_t key = first + i / 4 * 8 + own_key() + i % 2;
      const PhiloxBlock block = random_words(rows_.query_of(i % 4 / 2), key);
      const unsigned low = key % 2 == 0 ? block.words[0] : block.words[1];
      const unsigned high = key % 2 == 0 ? block.words[2] : block.words[3];
      kept |= (is_kept((key & 2) == 0 ? low : high) ? 1U : 0U) << i;
    }
    return kept;
  }
  __device__ __forceinline__ PhiloxBlock random_words(const QueryRow& row, std::int64_t key) const {
    return dropout_block(rules_.dropout_seed, sequence_.dropout_index,
                         rules_.dropout_head + row.head, rules_.dropout_query + row.token, key);
  }
  __device__ __forceinline__ bool is_kept(std::uint32_t word) const {
    return word >= rules_.dropout_threshold;
  }

  const ScoreRules& rules_;
  const Sequence& sequence_;
  const ThreadRows& rows_;
  const int first_;
  const int lane_;
};

}  // namespace ladon::cuda
