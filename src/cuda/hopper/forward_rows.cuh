// Finished rows of Hopper's forward kernel: rounded when their sums are done, and stored later,
// during the first products of the next tile.
#pragma once

#include <cfloat>
#include <cstdint>

#include "cuda/hopper/forward_tile.cuh"
#include "cuda/kernels/forward.cuh"
#include "cuda/kernels/forward_launch.h"
#include "cuda/kernels/forward_scores.cuh"
#include "cuda/kernels/tensor_core.cuh"

namespace ladon::cuda::hopper {

/// Of a warp's rows.
inline constexpr int kStoredBoxBytes = kStoredRows * kBoxRowBytes;

/// A thread's columns of its two rows: of each group of 8 the pair 2 (lane % 4).
template <class Half, int kGroups>
struct FinishedRows {
  unsigned pairs[2][kGroups];
  float lse;  // of row lane % 2
  bool are_finite[2];

  /// From the sums of weighted values. `first_row` is the thread's first, of the tile's.
  __device__ __forceinline__ void set(const ForwardParams<float>& params, const RowHeads& heads,
                                      int first_row, const RowState<float> (&total)[2],
                                      float (&sums)[kGroups][4]) {
    // The four lanes of the two rows work out one each.
    const int own = static_cast<int>(fresh(threadIdx.x) % 2);
    const float maximum = own == 0 ? total[0].maximum : total[1].maximum;
    const float sum = own == 0 ? total[0].sum : total[1].sum;
    const RowResult<float> result =
        finish_row(params.call.rules, heads.query_of(first_row + own * 8).head,
                   maximum * params.natural, sum, exp2f(kWeightShift<Half>));
    lse = result.lse;
    const bool are_seen[2] = {total[0].sum != 0, total[1].sum != 0};
    if (!__all_sync(0xffffffffU, are_seen[0] && are_seen[1])) clear_unseen(are_seen, sums);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float weight = __shfl_sync(0xffffffffU, result.weight * params.kept_factor, i, 4);
      unsigned zeros = 0;  // NaN where a result is infinite or NaN
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
        pairs[i][n] =
            pack<Half>(result_of(sums[n][i * 2], weight), result_of(sums[n][i * 2 + 1], weight));
        zeros = add_zeros(pairs[i][n], zeros);
      }
      are_finite[i] = (zeros & 0x7fff7fffU) == 0;
    }
  }

  /// Stores the warp's 16 rows to shared memory, in boxes of 64 columns.
  __device__ __forceinline__ void stage_boxes(std::uint32_t to) const {
    const int lane = static_cast<int>(fresh(threadIdx.x)) % 32;
#pragma unroll
    for (int n = 0; n < kGroups; n += 2) {
      const std::uint32_t matrices[4] = {pairs[0][n], pairs[1][n], pairs[0][n + 1],
                                         pairs[1][n + 1]};
      store_matrices(to + n / kBoxGroups * kStoredBoxBytes +
                         swizzled_offset(lane % 16, n % kBoxGroups + lane / 16),
                     matrices);
    }
  }

  /// Stores groups of columns, from `first` on, of the warp's 16 rows to shared memory.
  template <class Staging>
  __device__ __forceinline__ void stage(int first, std::uint32_t to) const {
    const unsigned lane = fresh(threadIdx.x) % 32;
    to += lane % 16 * Staging::kStride + lane / 16 * 16;
#pragma unroll
    for (int n = 0; n < Staging::kAtOnce; n += 2) {
      const std::uint32_t matrices[4] = {pairs[0][first + n], pairs[1][first + n],
                                         pairs[0][first + n + 1], pairs[1][first + n + 1]};
      store_matrices(to + static_cast<unsigned>(n * 16), matrices);
    }
  }

  static constexpr int kBoxGroups = kBoxColumns / 8;
  static constexpr int kBoxes = kGroups / kBoxGroups;

 private:
  /// Results are 0 where the row saw no key, even where the sums are not.
  __device__ __forceinline__ static void clear_unseen(const bool (&are_seen)[2],
                                                      float (&sums)[kGroups][4]) {
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[n][e] = are_seen[e / 2] ? sums[n][e] : 0;
    }
  }

  /// pair * 0 + zeros, of two elements.
  __device__ __forceinline__ static unsigned add_zeros(unsigned pair, unsigned zeros) {
    unsigned sum;
    if constexpr (std::is_same_v<Half, __nv_bfloat16>) {
      asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(pair), "r"(0), "r"(zeros));
    } else {
      asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(pair), "r"(0), "r"(zeros));
    }
    return sum;
  }
};

/// Marks the tile of the careful kernel that holds the row: 64 rows of a KV head.
__device__ __forceinline__ void mark_unfinished(const ForwardParams<float>& params, int sequence,
                                                const QueryRow& row) {
  const AttentionParams& call = params.call;
  const std::int64_t kv_head = row.head / call.group;
  const std::int64_t careful_row = row.token * call.group + row.head % call.group;
  const std::int64_t careful_tile =
      (sequence * call.num_kv_heads + kv_head) * params.row_tiles + careful_row / kMmaRows;
  params.unfinished[0] = 1;
  params.unfinished[1 + careful_tile] = 1;
}

/// Of a tile's rows, 16 of a warp from `first_row` on: lane i < 16 notes behind staged row i where
/// it goes, or null where there is no such row.
template <class Half, class Staging>
__device__ __forceinline__ void note_places(const AttentionParams& call,
                                            const AnnouncedTile& announced, int first_row, int rows,
                                            unsigned char* staging) {
  const ForwardTile& tile = announced.tile;
  const int lane = static_cast<int>(fresh(threadIdx.x)) % 32;
  const int row = first_row + lane;
  if (lane >= Staging::kRows) return;
  Half* place = nullptr;
  if (is_row(row, rows)) {
    const QueryRow query = tile.heads.query_of(row);
    place = static_cast<Half*>(call.out.data) + announced.sequence.out +
            query.token * call.out.token_stride + query.head * call.out.head_stride;
  }
  *Staging::template place<Half>(staging, lane) = place;
}

/// Copies staged columns, `first` and those behind it, to where their rows go: 16 bytes a lane.
template <class Half, class Staging>
__device__ __forceinline__ void copy_aligned(const unsigned char* staging, int first, int columns) {
  constexpr int kChunks = Staging::kAtOnce;
  constexpr int kRowsAtOnce = 32 / kChunks;
  const int lane = static_cast<int>(fresh(threadIdx.x)) % 32;
  const int chunk = lane % kChunks;
  const bool exists = (first + chunk) * 8 < columns;
  staging += lane / kChunks * Staging::kStride;
#pragma unroll
  for (int row = 0; row < Staging::kRows; row += kRowsAtOnce) {
    Half* const to = *Staging::template place<Half>(staging, row);
    const uint4 eight =
        *reinterpret_cast<const uint4*>(staging + row * Staging::kStride + chunk * 16);
    if (exists && to != nullptr) *reinterpret_cast<uint4*>(to + (first + chunk) * 8) = eight;
  }
}

/// The same where rows are not aligned, or not of whole 16 bytes.
template <class Half, class Staging>
__device__ __forceinline__ void copy_elements(const unsigned char* staging, int first,
                                              int columns) {
  const int lane = static_cast<int>(fresh(threadIdx.x)) % 32;
  const int count = min(columns - first * 8, Staging::kAtOnce * 8);
#pragma unroll 1
  for (int row = 0; row < Staging::kRows; ++row) {
    Half* const to = *Staging::template place<Half>(staging, row);
    if (to == nullptr) continue;
    const auto* const from = reinterpret_cast<const Half*>(staging + row * Staging::kStride);
#pragma unroll 1
    for (int column = lane; column < count; column += 32) to[first * 8 + column] = from[column];
  }
}

/// Lets the copy engine store the warp's rows, which are `first_row` of the tile and those below.
template <class Half, int kGroups>
__device__ __forceinline__ void store_boxes(const CUtensorMap& out, const AnnouncedTile& announced,
                                            int first_row,
                                            const FinishedRows<Half, kGroups>& results,
                                            std::uint32_t staging) {
  results.stage_boxes(staging);
  publish_writes();
  __syncwarp();
  if (fresh(threadIdx.x) % 32 != 0) return;
#pragma unroll
  for (int box = 0; box < FinishedRows<Half, kGroups>::kBoxes; ++box) {
    store_box(out, box * kBoxColumns, announced.tile.heads.first, announced.out_row + first_row,
              staging + static_cast<unsigned>(box * kStoredBoxBytes));
  }
  commit_stores();
}

/// Waits until the copy engine has read what the warp's rows were put together in.
__device__ __forceinline__ void finish_boxes() {
  if (fresh(threadIdx.x) % 32 == 0) finish_reading();
  __syncwarp();
}

/// Writes the warp's 16 rows of a tile, from `tile_row` of the tile on, and their lse. All lanes
/// call it.
template <class Memory, class Half, int kGroups>
__device__ __forceinline__ void store_rows(const HopperForwardParams& hopper,
                                           const AnnouncedTile& announced, int tile_row,
                                           const FinishedRows<Half, kGroups>& results,
                                           unsigned char* staging) {
  using Staging = typename Memory::Staging;
  const ForwardParams<float>& params = hopper.forward;
  const AttentionParams& call = params.call;
  const ForwardTile& tile = announced.tile;
  const Sequence& sequence = announced.sequence;
  const int lane = static_cast<int>(fresh(threadIdx.x)) % 32;
  const int first_row = tile_row + tile.first_token * tile.heads.heads;
  const int rows = static_cast<int>(sequence.query_len) * tile.heads.heads;

  // Its quad's lanes 0 and 1 have the lse of the two rows.
  const int own_row = first_row + lane / 4 + lane % 2 * 8;
  if (call.lse.data != nullptr && lane % 4 < 2 && is_row(own_row, rows)) {
    const QueryRow query = tile.heads.query_of(own_row);
    store_lse(
        call.lse,
        sequence.lse + query.token * call.lse.token_stride + query.head * call.lse.head_stride,
        results.lse);
  }
  if (!__all_sync(0xffffffffU, results.are_finite[0] && results.are_finite[1])) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row + lane / 4 + i * 8;
      if (results.are_finite[i] || !is_row(row, rows)) continue;
      mark_unfinished(params, tile.sequence, tile.heads.query_of(row));
    }
  }

  if constexpr (Memory::kStoresBoxes) {
    finish_boxes();
    if (hopper.stores_boxes && is_row(first_row, rows) && first_row + kStoredRows <= rows) {
      store_boxes(hopper.out, announced, tile_row, results, shared_address(staging));
      return;
    }
  }
  __syncwarp();  // earlier sums may have been read there
  note_places<Half, Staging>(call, announced, first_row, rows, staging);
  const auto columns = static_cast<int>(call.value_dim);
  const bool aligned = params.aligned_out && columns % 8 == 0;
#pragma unroll
  for (int first = 0; first < kGroups; first += Staging::kAtOnce) {
    if (first != 0) __syncwarp();
    results.template stage<Staging>(first, shared_address(staging));
    __syncwarp();
    if (aligned) {
      copy_aligned<Half, Staging>(staging, first, columns);
    } else {
      copy_elements<Half, Staging>(staging, first, columns);
    }
  }
}

}  // namespace ladon::cuda::hopper
