// Tiles of Hopper's backward kernels: which keys and rows a block has, and the shared memory that
// they go through.
//
// A block owns some neighbouring tiles of 64 keys (for dk and dv) or 64 rows (for dq), one for each
// of its warpgroups that compute, and walks over the tiles of rows or keys that any of them meets.
#pragma once

#include <cstdint>

#include "cuda/hopper/backward_params.h"
#include "cuda/hopper/barrier.cuh"
#include "cuda/hopper/bulk_copy.cuh"
#include "cuda/hopper/wgmma.cuh"

namespace ladon::cuda::hopper {

using backward::kTile;
using backward::OtherTile;
using backward::RowStats;
using backward::TileRange;
using backward::TileWalk;

static_assert(kTile == kGroupRows);

/// Own tiles of a block: one for each warpgroup that computes, as many as have enough registers.
__host__ __device__ constexpr int own_tiles(bool is_wide) { return is_wide ? 2 : 3; }

/// Rows of two operands: k and v of some keys, or q and dout of some rows.
template <int kColumns>
struct OperandPair {
  static constexpr int kBoxes = kColumns / kBoxColumns;
  static constexpr int kBoxBytes = kTile * kBoxRowBytes;
  alignas(1024) unsigned char first[kBoxes][kBoxBytes];
  alignas(1024) unsigned char second[kBoxes][kBoxBytes];
};

/// A tile that both warpgroups read, and what is known of its rows.
struct StageInfo {
  RowStats<float> stats[kTile];  // where it is of rows
  std::uint64_t live;            // a bit for each row that exists, and sees a key
};

/// What a block computes at a time.
template <bool kOwnKeys, int kOwnTiles>
struct BackwardWork {
  TileWalk<kOwnKeys> walks[kOwnTiles];
  TileRange met;  // by any of the own tiles
  bool exists = false;
};

template <int kColumns, bool kOwnKeys>
struct BackwardMemory {
  using Pair = OperandPair<kColumns>;
  static constexpr int kOwnTiles = own_tiles(kColumns > kBoxColumns);
  static constexpr int kThreads = (1 + kOwnTiles) * kGroupThreads;
  static constexpr int kStages = kColumns == 128 ? 4 : 8;

  Pair own[kOwnTiles];
  Pair stages[kStages];
  StageInfo infos[kStages];
  // Three in turns: one is stored, one computed and one announced.
  BackwardWork<kOwnKeys, kOwnTiles> works[3];
  BufferBarriers own_barriers;
  BufferBarriers barriers[kStages];
};

/// Slots of `own` tiles before a sequence, counted from the tiles before it: enough for each
/// sequence to start with a slot, and at most one too many for each.
template <class Int>
__host__ __device__ constexpr Int slots_before(Int tiles, Int sequences, int own) {
  return (tiles + sequences * (own - 1)) / own;
}

/// Finds the own tiles of a ticket. Those of a head follow each other, the longest of causal calls
/// first. A tile that does not exist meets nothing; false where none exists. Counts of slots fit 32
/// bits: the tickets do.
template <bool kOwnKeys, int kOwnTiles>
__device__ inline bool find_work(const BackwardParams& params, int ticket,
                                 BackwardWork<kOwnKeys, kOwnTiles>& work) {
  const std::int64_t* const starts = kOwnKeys ? params.key_tile_starts : params.row_tile_starts;
  const auto slots_of = [&](int sequence) {
    return slots_before(static_cast<int>(starts[sequence]), sequence, kOwnTiles);
  };
  const auto sequences = static_cast<int>(params.call.num_sequences);
  const int slots = slots_of(sequences);
  const int owner = ticket / slots;
  const int slot = kOwnKeys ? ticket - owner * slots : (owner + 1) * slots - 1 - ticket;
  int low = 0;
  int high = sequences;
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    (slots_of(middle) <= slot ? low : high) = middle;
  }
  const int first = (slot - slots_of(low)) * kOwnTiles;
  const auto tiles = static_cast<int>(starts[low + 1] - starts[low]);
  if (first >= tiles) return false;
  work.met = {};
#pragma unroll 1
  for (int i = 0; i < kOwnTiles; ++i) {
    TileWalk<kOwnKeys>& walk = work.walks[i];
    walk.set(params, low, first + i, owner);
    if (first + i >= tiles) walk.others = {};
    if (walk.others.begin == walk.others.end) continue;
    const bool is_first = work.met.begin == work.met.end;
    work.met.begin = is_first ? walk.others.begin : min(work.met.begin, walk.others.begin);
    work.met.end = is_first ? walk.others.end : max(work.met.end, walk.others.end);
  }
  work.exists = true;
  return true;
}

/// A bit for each row of an own or another tile that exists, and sees a key where it is a query.
__device__ inline std::uint64_t live_keys(const Sequence& sequence, std::int32_t tile) {
  const std::int64_t count = sequence.kv_len - std::int64_t{tile} * kTile;
  return count >= kTile ? ~std::uint64_t{0} : (std::uint64_t{1} << count) - 1;
}
template <bool kOwnKeys>
__device__ inline std::uint64_t live_rows(const BackwardParams& params,
                                          const TileWalk<kOwnKeys>& walk, std::int32_t head,
                                          std::int32_t tile) {
  return params.live_rows[head * params.num_row_tiles + walk.row_tile_start + tile];
}

}  // namespace ladon::cuda::hopper
