// Tasks of Hopper's latent kernel: which rows and blocks of keys they are, the shared memory that
// they go through, and the copies that fill it.
#pragma once

#include <cstdint>

#include "cuda/hopper/barrier.cuh"
#include "cuda/hopper/bulk_copy.cuh"
#include "cuda/hopper/cluster.cuh"
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
  int first_row = 0;   // of the KV head's in the sequence
  int common_row = 0;  // the first of all tiles that share copies
  int rows = 0;        // of the KV head in the sequence
  int origin = 0;      // see Sequence
  int kv_len = 0;
  BlockRange blocks;      // that some row of these tiles sees, in this part
  BlockRange whole;       // of which all rows see every key
  int first_segment = 0;  // that the sequence holds
  int key_row = 0;        // of the sequence's first key, where there are no pages
  const std::int32_t* pages = nullptr;

  /// The tiles of a sequence read the same keys, so they come together. The last see most keys, and
  /// come first. `tiles` share copies, and go through the same blocks.
  __device__ __forceinline__ LatentWork(const LatentParams& params, int number, int tiles)
      : index(number) {
    const LatentSchedule& schedule = params.schedule;
    const AttentionParams& call = params.forward.call;
    const int group = static_cast<int>(call.group);
    const int tile = schedule.row_tiles - 1 - number % schedule.row_tiles;
    first_row = tile * kLatentRows;
    common_row = tile / tiles * tiles * kLatentRows;
    number /= schedule.row_tiles;
    part = number % schedule.parts;
    number /= schedule.parts;
    kv_head = number % static_cast<int>(call.num_kv_heads);
    sequence = number / static_cast<int>(call.num_kv_heads);

    const Sequence& lengths = call.sequences[sequence];
    rows = static_cast<int>(lengths.query_len) * group;
    if (common_row >= rows) return;
    origin = static_cast<int>(lengths.key_origin);
    kv_len = static_cast<int>(lengths.kv_len);
    first_segment = origin / kSegmentKeys;
    pages = lengths.pages;
    if (pages == nullptr) {
      key_row = static_cast<int>(lengths.k / call.k.token_stride + lengths.first_slot);
    }
    const int first = common_row / group;
    const int last = (min(rows, common_row + tiles * kLatentRows) - 1) / group;
    const BlockRange visible = visible_blocks(call.rules, lengths, first, last);
    whole = whole_blocks(call.rules, lengths, first, last);
    const int start = (first_segment + part * schedule.part_segments) * kSegmentBlocks;
    blocks.begin = max(visible.begin, start);
    blocks.end =
        max(blocks.begin, min(visible.end, start + schedule.part_segments * kSegmentBlocks));
  }

  __device__ __forceinline__ bool has_rows() const { return common_row < rows; }
  /// Segments that are not the sequence's first are kept apart.
  __device__ __forceinline__ bool is_apart() const { return part > 0; }
  __device__ __forceinline__ RowHeads heads(int group) const { return {kv_head * group, group}; }
};

/// A fold of a row's segment, for the threads that have its sums: factors of what came before and
/// of the segment. What is not taken has factor 0, and is 0 itself: its weights were. Where it is
/// not, because some key has infinities or NaN, the sums become NaN and the tile is computed again.
struct RowFold {
  float earlier = 0;
  float segment = 0;

  __device__ __forceinline__ float operator()(float before, float added) const {
    return fmaf(before, earlier, added * segment);
  }
};

/// Where latents begin that the copying warp has yet to copy: their last columns, which have one
/// buffer, and the others.
struct LatentRows {
  int rope = 0;
  int latents = 0;
};

struct LatentMemory {
  static constexpr int kStages = 3;
  static constexpr int kMostBoxes = kBlockKeys / 8;  // of a block: pages have 8 latents at least

  alignas(1024) unsigned char latents[kStages][kValueBoxes][kBoxBytes];  // of one block of keys
  alignas(1024) unsigned char rope[kBoxBytes];
  alignas(1024) unsigned char queries[kValueBoxes + 1 - kRegisterBoxes][kBoxBytes];
  alignas(1024) unsigned char weights[kBoxBytes];  // of one block; queries on their way, too
  float rescale[2][kLatentRows];                   // of two blocks by turns
  RowFold folds[kLatentRows];                      // of the last finished segment
  float factors[kLatentRows];           // of a row's sums in the end; negative: it saw no key
  RowState<float> totals[kLatentRows];  // of the segments that are folded
  LatentWork work;
  LatentRows rows[kMostBoxes];
  Barrier latents_full[kStages];
  Barrier latents_empty[kStages];  // in all blocks of threads that share copies
  BufferBarriers rope_barriers;
  BufferBarriers weights_barriers;
  Barrier may_sum;  // the tensor cores have no scores to multiply that are waited for
};

static_assert(sizeof(LatentMemory) + 1024 <= 227 * 1024, "a multiprocessor has no more");

/// Which stage a block of latents goes through, by its number among all that a block of threads has
/// had, and the parity of the stage's phase when it is filled and, before that, emptied. From one
/// number, for want of registers.
__device__ __forceinline__ int stage_of(unsigned number) {
  return static_cast<int>(number % LatentMemory::kStages);
}
__device__ __forceinline__ unsigned filled_parity(unsigned number) {
  return number / LatentMemory::kStages & 1U;
}
__device__ __forceinline__ unsigned emptied_parity(unsigned number) {
  return filled_parity(number) ^ 1U;
}

/// The next task for all; the last must be done with by all. The roles come here by branches of
/// their own, each with its copy of the barriers, which __syncthreads() does not allow. kTiles
/// share copies.
template <int kTiles>
__device__ __forceinline__ void take_work(const LatentParams& params, LatentMemory& memory,
                                          int number, bool writes) {
  __syncwarp();  // rows that do not exist make the threads of a warp diverge
  sync_threads(kBlockBarrier, kLatentThreads);
  if (writes) {
    memory.work = LatentWork(params, number, kTiles);
    params.unfinished[number] = 0;
  }
  sync_threads(kBlockBarrier, kLatentThreads);
}

}  // namespace ladon::cuda::hopper
