// Steps that Hopper's decode kernels share: where a key is stored, and how a block's scores become
// weights and their sums. The arithmetic is that of forward_scores.cuh, so the bits are the same.
#pragma once

#include <cstdint>

#include "cuda/kernels/forward_mma.cuh"

namespace ladon::cuda::hopper {

inline constexpr int kBlockSteps = kBlockKeys / 16;  // products with a block's values

/// The slots of kCount keys, `first` and every `step`-th after it; -1 where there is none. Some key
/// of the sequence exists. What a page table says is read for all of them at once, without a
/// branch: it is in memory far away.
template <int kCount>
__device__ __forceinline__ void find_slots(const KvLayout& layout, const Sequence& sequence,
                                           int first, int step, std::int64_t (&slots)[kCount]) {
  const auto kv_len = static_cast<int>(sequence.kv_len);
  if (layout.page_size != 0) {
    const auto size = static_cast<unsigned>(layout.page_size);
    int pages[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int key = min(max(first + i * step, 0), kv_len - 1);
      pages[i] = sequence.pages[static_cast<unsigned>(key) / size];
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const auto in_page = static_cast<unsigned>(first + i * step) % size;
      slots[i] = pages[i] * layout.page_size + in_page;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const std::int64_t place = sequence.ring_start + first + i * step;
      const bool wraps = layout.ring_slots != 0 && place >= layout.ring_slots;
      slots[i] = sequence.first_slot + (layout.ring_slots == 0 ? first + i * step
                                        : wraps                ? place - layout.ring_slots
                                                               : place);
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int key = first + i * step;
    if (key < 0 || key >= kv_len) slots[i] = -1;
  }
}

/// A block's scores become weights relative to `base`, one for each of the thread's rows, and
/// operands of products in shared memory, by lane.
template <class Half>
__device__ __forceinline__ void make_weights(ThreadScores& scores, const float (&base)[2],
                                             float factor, uint4 (&operands)[kBlockSteps][32],
                                             int lane) {
  const WeightPower<Half> powers[2] = {{base[0], factor}, {base[1], factor}};
#pragma unroll
  for (int n = 0; n < kKeyGroups; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) scores[n][e] = exp2_approximate(powers[e / 2](scores[n][e]));
  }
#pragma unroll
  for (int step = 0; step < kBlockSteps; ++step) {
    unsigned rounded[4];
    rounded_weights<Half>(scores, step, rounded);
    operands[step][lane] = make_uint4(rounded[0], rounded[1], rounded[2], rounded[3]);
  }
}

/// A thread's sums of the blocks before, rescaled, and a block's weights.
__device__ __forceinline__ float2 add_weights(float2 sums, const float (&rescale)[2],
                                              const ThreadScores& weights) {
  sums.x *= rescale[0];
  sums.y *= rescale[1];
#pragma unroll
  for (int n = 0; n < kKeyGroups; ++n) {
    sums.x += weights[n][0];
    sums.x += weights[n][1];
    sums.y += weights[n][2];
    sums.y += weights[n][3];
  }
  return sums;
}

/// The sums of a row's four threads, for the thread's two rows.
__device__ __forceinline__ void store_totals(float (&totals)[16], float2 sums, int lane) {
  const float of_rows[2] = {row_sum(RowState<float>{0, sums.x}).sum,
                            row_sum(RowState<float>{0, sums.y}).sum};
  if (lane % 4 != 0) return;
  totals[lane / 4] = of_rows[0];
  totals[lane / 4 + 8] = of_rows[1];
}

}  // namespace ladon::cuda::hopper
