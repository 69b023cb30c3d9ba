// Tasks of Hopper's latent kernel: which rows and blocks of keys they are, the shared memory that
// they go through, and the copies that fill it.
#pragma once

#include <cstdint>

#include "cuda/hopper/barrier.cuh"
#include "cuda/hopper/bulk_copy.cuh"
#include "cuda/hopper/latent_params.h"
#include "cuda/hopper/wgmma.cuh"

namespace ladon::cuda::hopper {

inline constexpr int kLatentThreads = 3 * kGroupThreads;
inline constexpr int kBoxBytes = kBlockKeys * kBoxRowBytes;  // 64 rows of 64 columns
inline constexpr int kValueBoxes = kLatentColumns / kBoxColumns;
inline constexpr int kHalfBoxes = kValueBoxes / 2;  // of one warpgroup of sums
inline constexpr int kRegisterBoxes = 7;  // of the queries: the others are in shared memory

/// What the warps must know of a task. In shared memory: registers are full while products run.
struct LatentWork {
  int index = 0;  // of the task
  int sequence = 0;
  int kv_head = 0;
  int part = 0;
  int first_row = 0;  // of the KV head's in the sequence
  int rows = 0;       // of the KV head in the sequence
  int origin = 0;     // see Sequence
  int kv_len = 0;
  BlockRange blocks;      // that some row of the tile sees, in this part
  BlockRange whole;       // of which all rows see every key
  int first_segment = 0;  // that the sequence holds
  int key_row = 0;        // of the sequence's first key, where there are no pages
  const std::int32_t* pages = nullptr;

  /// The tiles of a sequence read the same keys, so they come together. The last see most keys, and
  /// come first.
  __device__ __forceinline__ LatentWork(const LatentParams& params, int number) : index(number) {
    const LatentSchedule& schedule = params.schedule;
    const AttentionParams& call = params.forward.call;
    const int group = static_cast<int>(call.group);
    first_row = (schedule.row_tiles - 1 - number % schedule.row_tiles) * kLatentRows;
    number /= schedule.row_tiles;
    part = number % schedule.parts;
    number /= schedule.parts;
    kv_head = number % static_cast<int>(call.num_kv_heads);
    sequence = number / static_cast<int>(call.num_kv_heads);

    const Sequence& lengths = call.sequences[sequence];
    rows = static_cast<int>(lengths.query_len) * group;
    if (first_row >= rows) return;
    origin = static_cast<int>(lengths.key_origin);
    kv_len = static_cast<int>(lengths.kv_len);
    first_segment = origin / kSegmentKeys;
    pages = lengths.pages;
    if (pages == nullptr) {
      key_row = static_cast<int>(lengths.k / call.k.token_stride + lengths.first_slot);
    }
    const int first = first_row / group;
    const int last = (min(rows, first_row + kLatentRows) - 1) / group;
    const BlockRange visible = visible_blocks(call.rules, lengths, first, last);
    whole = whole_blocks(call.rules, lengths, first, last);
    const int start = (first_segment + part * schedule.part_segments) * kSegmentBlocks;
    blocks.begin = max(visible.begin, start);
    blocks.end =
        max(blocks.begin, min(visible.end, start + schedule.part_segments * kSegmentBlocks));
  }

  __device__ __forceinline__ bool has_rows() const { return first_row < rows; }
  /// Segments that are not the sequence's first are kept apart.
  __device__ __forceinline__ bool is_apart() const { return part > 0; }
  __device__ __forceinline__ RowHeads heads(int group) const { return {kv_head * group, group}; }
};

/// `yes` or `no`, without a branch: the compiler would make one around all of a thread's sums, and
/// keep two sets of them.
__device__ __forceinline__ float select(bool condition, float yes, float no) {
  float selected;
  asm("{\n"
      ".reg .pred condition;\n"
      "setp.ne.s32 condition, %3, 0;\n"
      "selp.f32 %0, %1, %2, condition;\n"
      "}"
      : "=f"(selected)
      : "f"(yes), "f"(no), "r"(condition ? 1 : 0));
  return selected;
}

/// A fold of a row's segment, for the threads that have its sums: factors of what came before and
/// of the segment, negative where it is not taken. NaN is taken.
struct RowFold {
  float earlier = 0;
  float segment = 0;

  __device__ __forceinline__ bool takes_segment() const { return !(segment < 0); }
  __device__ __forceinline__ float operator()(float before, float added) const {
    const float both = fmaf(before, earlier, added * segment);
    return select(takes_segment(), select(earlier < 0, added, both), before);
  }
};

struct LatentMemory {
  static constexpr int kStages = 3;

  alignas(1024) unsigned char latents[kStages][kValueBoxes][kBoxBytes];  // of one block of keys
  alignas(1024) unsigned char rope[kBoxBytes];
  alignas(1024) unsigned char queries[kValueBoxes + 1 - kRegisterBoxes][kBoxBytes];
  alignas(1024) unsigned char weights[kBoxBytes];  // of one block; queries on their way, too
  float rescale[kLatentRows];
  RowFold folds[kLatentRows];           // of the last finished segment
  float factors[kLatentRows];           // of a row's sums in the end; negative: it saw no key
  RowState<float> totals[kLatentRows];  // of the segments that are folded
  LatentWork work;
  Barrier latents_full[kStages];
  BufferBarriers rope_barriers;
  BufferBarriers weights_barriers;
};

/// The next task for all; the last must be done with by all. The roles come here by branches of
/// their own, each with its copy of the barriers, which __syncthreads() does not allow.
__device__ __forceinline__ void take_work(const LatentParams& params, LatentMemory& memory,
                                          int number, bool writes) {
  sync_threads(kBlockBarrier, kLatentThreads);
  if (writes) {
    memory.work = LatentWork(params, number);
    params.unfinished[number] = 0;
  }
  sync_threads(kBlockBarrier, kLatentThreads);
}

}  // namespace ladon::cuda::hopper
