// Copies of latents to shared memory, block by block, by one warp of Hopper's latent kernel.
#pragma once

#include <climits>

#include "cuda/hopper/latent_tile.cuh"

namespace ladon::cuda::hopper {

class LatentCopier {
 public:
  __device__ __forceinline__ LatentCopier(const LatentParams& params, LatentMemory& memory)
      : params_(params), memory_(memory), work_(memory.work) {}

  /// The first blocks of a task; `stage` is the first's.
  __device__ __forceinline__ void start(int stage) {
    const int begin = work_.blocks.begin;
    row_ = find_row(begin);
    next_row_ = find_row(begin + 1);
    const int third = find_row(begin + 2);
    copy_rope();
    copy_latents(row_, stage);
    stage = next(stage);
    copy_latents(next_row_, stage);
    copy_latents(third, next(stage));
    row_ = next_row_;
    next_row_ = third;
  }

  /// Goes on to `block`, and finds the one after it: page tables are in memory far away.
  __device__ __forceinline__ void advance(int block) {
    row_ = next_row_;
    next_row_ = find_row(block + 1);
  }
  __device__ __forceinline__ void copy_latents(int stage) { copy_latents(row_, stage); }
  __device__ __forceinline__ void copy_rope() {
    Barrier& full = memory_.rope_barriers.full;
    expect(row_, full, 1);
    if (row_ == kNoRow) return;
    copy_box(shared_address(memory_.rope) + offset(), params_.latents, kValueBoxes * kBoxColumns,
             row_, work_.kv_head, full);
  }

 private:
  static constexpr int kNoRow = INT_MIN;

  __device__ __forceinline__ static int lane() { return static_cast<int>(fresh(threadIdx.x)) % 32; }
  __device__ __forceinline__ static int next(int stage) {
    return stage + 1 == LatentMemory::kStages ? 0 : stage + 1;
  }
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
    const int size = static_cast<int>(params_.forward.call.kv_layout.page_size);
    return work_.pages[key / size] * size + key % size;
  }

  /// Tells the barrier what is coming, if anything is.
  __device__ __forceinline__ void expect(int row, Barrier& full, int boxes) const {
    const unsigned lanes = __ballot_sync(0xffffffffU, row != kNoRow);
    if (lanes != 0 && lane() == 0) {
      full.arrive_expecting(__popc(lanes) * params_.box_rows * kBoxRowBytes * boxes);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void copy_latents(int row, int stage) {
    Barrier& full = memory_.latents_full[stage];
    expect(row, full, kValueBoxes);
    if (row == kNoRow) return;
    std::uint32_t to = shared_address(memory_.latents[stage]) + offset();
    if (params_.has_wide_boxes) return copy_box(to, params_.wide_latents, 0, row, 0, full);
#pragma unroll 1
    for (int column = 0; column < kLatentColumns; column += kBoxColumns, to += kBoxBytes) {
      copy_box(to, params_.latents, column, row, work_.kv_head, full);
    }
  }

  const LatentParams& params_;
  LatentMemory& memory_;
  const LatentWork& work_;
  int row_ = 0;
  int next_row_ = 0;
};

}  // namespace ladon::cuda::hopper
