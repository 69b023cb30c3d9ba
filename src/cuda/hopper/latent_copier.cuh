// Copies of latents to shared memory, block by block, by one warp of Hopper's latent kernel: one of
// those that sum, which have time while scores are multiplied.
#pragma once

#include <climits>

#include "cuda/hopper/latent_tile.cuh"

namespace ladon::cuda::hopper {

/// kTiles: blocks of threads of a cluster. They need the same latents, so each copies a part of
/// their columns to all of them.
template <int kTiles>
class LatentCopier {
 public:
  __device__ __forceinline__ LatentCopier(const LatentParams& params, LatentMemory& memory)
      : params_(params), memory_(memory), work_(memory.work) {}

  /// The first blocks of a task; `number` is the first's.
  __device__ __forceinline__ void start(unsigned number) {
    const int begin = work_.blocks.begin;
    const int first = find_row(begin);
    const int second = find_row(begin + 1);
    const int third = find_row(begin + 2);
    copy_rope(first, number);
    copy_latents(first, number);
    copy_latents(second, number + 1);
    copy_latents(third, number + 2);
    note_rows({third, find_row(begin + 3)});
    copy_rope(second, number + 1);
  }

  /// Whether those of the block before `number` have been multiplied.
  __device__ __forceinline__ bool is_rope_free(unsigned number) {
    return memory_.rope_barriers.empty.has_ended((number & 1U) ^ 1U);
  }
  /// Copies the last columns of block `number`, when those of the block before are done with.
  __device__ __forceinline__ void next_rope(unsigned number) {
    copy_rope(noted_rows().rope, number);
  }
  /// Copies `block`, whose number is `number`. Where its stage is still in use, waits until it is
  /// not. Page tables are in memory far away: what is found now is for the next block.
  __device__ __forceinline__ void next_latents(int block, unsigned number) {
    const int row = noted_rows().latents;
    copy_latents(row, number);
    note_rows({row, find_row(block + 1)});
  }
  /// Waits until the other blocks of threads of the cluster have arrived at this one's barriers for
  /// the last time: its shared memory must not go before that. `number` is that of the block after
  /// the last.
  __device__ __forceinline__ void wait_for_others(unsigned number) {
#pragma unroll 1
    for (unsigned next = number; next < number + LatentMemory::kStages; ++next) {
      memory_.latents_empty[stage_of(next)].wait(emptied_parity(next));
    }
  }

 private:
  static constexpr int kNoRow = INT_MIN;
  static constexpr int kOwnBoxes = kValueBoxes / kTiles;
  static constexpr std::uint16_t kAll = (1U << kTiles) - 1;

  __device__ __forceinline__ static int lane() { return static_cast<int>(fresh(threadIdx.x) % 32); }
  /// Of the lane's latents in a box.
  __device__ __forceinline__ unsigned offset() const {
    return static_cast<unsigned>(lane() * params_.box_rows * kBoxRowBytes);
  }

  /// Where the lane's latents of a block begin. One lane has the block, or, where pages are
  /// shorter, each has a page. kNoRow: nothing to copy.
  __device__ __forceinline__ int find_row(int block) const {
    if (block >= work_.blocks.end || lane() * params_.box_rows >= kBlockKeys) return kNoRow;
    const int key = block * kBlockKeys - work_.origin + lane() * params_.box_rows;
    if (work_.pages == nullptr) return work_.key_row + key;
    if (key >= work_.kv_len) return kNoRow;
    const auto size = static_cast<unsigned>(params_.forward.call.kv_layout.page_size);
    const unsigned page = key < 0 ? 0U : static_cast<unsigned>(key) / size;
    return (work_.pages[page] - static_cast<int>(page)) * static_cast<int>(size) + key;
  }

  /// The lane's rows of the next blocks are in shared memory, for want of registers.
  __device__ __forceinline__ void note_rows(const LatentRows& rows) {
    if (lane() < LatentMemory::kMostBoxes) memory_.rows[lane()] = rows;
  }
  __device__ __forceinline__ LatentRows noted_rows() const {
    return lane() < LatentMemory::kMostBoxes ? memory_.rows[lane()] : LatentRows{kNoRow, kNoRow};
  }

  /// Tells the barrier what is coming.
  __device__ __forceinline__ void expect(int row, Barrier& full, int boxes) const {
    const unsigned lanes = __ballot_sync(0xffffffffU, row != kNoRow);
    if (lane() == 0) {
      full.arrive_expecting(__popc(lanes) * params_.box_rows * kBoxRowBytes * boxes);
    }
    __syncwarp();
  }

  /// Each block of threads has its own.
  __device__ __forceinline__ void copy_rope(int row, unsigned number) {
    if (!params_.has_rope || __ballot_sync(0xffffffffU, row != kNoRow) == 0) return;
    Barrier& full = memory_.rope_barriers.full;
    memory_.rope_barriers.empty.wait((number & 1U) ^ 1U);
    expect(row, full, 1);
    if (row == kNoRow) return;
    copy_box(shared_address(memory_.rope) + offset(), params_.latents, kValueBoxes * kBoxColumns,
             row, work_.kv_head, full, params_.policy);
  }
  __device__ __forceinline__ void copy_latents(int row, unsigned number) {
    const int stage = stage_of(number);
    Barrier& full = memory_.latents_full[stage];
    if (__ballot_sync(0xffffffffU, row != kNoRow) == 0) return;
    memory_.latents_empty[stage].wait(emptied_parity(number));
    expect(row, full, kValueBoxes);
    if (row == kNoRow) return;
    const int first_box = kTiles == 1 ? 0 : static_cast<int>(cluster_rank()) * kOwnBoxes;
    std::uint32_t to = shared_address(memory_.latents[stage][first_box]) + offset();
    if (params_.has_wide_boxes) return copy(to, params_.wide_latents, 0, row, first_box, full);
#pragma unroll 1
    for (int box = first_box; box < first_box + kOwnBoxes; ++box, to += kBoxBytes) {
      copy(to, params_.latents, box * kBoxColumns, row, work_.kv_head, full);
    }
  }
  __device__ __forceinline__ void copy(std::uint32_t to, const CUtensorMap& map, int x, int y,
                                       int z, const Barrier& full) const {
    if constexpr (kTiles == 1) {
      copy_box(to, map, x, y, z, full, params_.policy);
    } else {
      copy_box(to, map, x, y, z, full, Multicast{kAll, params_.policy});
    }
  }

  const LatentParams& params_;
  LatentMemory& memory_;
  const LatentWork& work_;
};

}  // namespace ladon::cuda::hopper
