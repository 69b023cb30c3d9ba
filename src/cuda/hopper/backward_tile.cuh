// Tiles of Hopper's backward kernel: which keys and rows a block has, and the shared memory that
// they go through.
//
// A block owns two neighbouring tiles of 64 keys, one for each of its warpgroups that compute, and
// walks over the tiles of rows that either of them meets.
#pragma once

#include <cstdint>

#include "cuda/hopper/backward_params.h"
#include "cuda/hopper/barrier.cuh"
#include "cuda/hopper/bulk_copy.cuh"
#include "cuda/hopper/wgmma.cuh"
#include "cuda/kernels/backward_fragments.cuh"

namespace ladon::cuda::hopper {

using backward::kBlockTiles;
using backward::kTile;
using backward::RowStats;
using backward::TileRange;
using backward::TileWalk;

static_assert(kTile == kGroupRows);

/// Columns of q and k and of v and dout, padded.
template <int kHead, int kValue>
struct BackwardShape {
  static constexpr int kHeadColumns = kHead;
  static constexpr int kValueColumns = kValue;
  // Rows whose scores are in registers at once: with sums of 320 columns there is only room for
  // half a tile.
  static constexpr int kStepRows = kHead + kValue > 256 ? kTile / 2 : kTile;
  static constexpr int kSteps = kTile / kStepRows;  // of a tile
};
using NarrowShape = BackwardShape<64, 64>;
using MiddleShape = BackwardShape<128, 128>;
using LatentShape = BackwardShape<192, 128>;
using WideShape = BackwardShape<256, 256>;  // backward_wide_tile.cuh

/// Tiles of rows that a block of the dq kernel for WideShape owns.
inline constexpr int kRowTiles = 2;

/// Rows of two operands: k and v of some keys, or q and dout of some rows.
template <class Shape, int kOfRows>
struct OperandPair {
  static constexpr int kRows = kOfRows;
  static constexpr int kBoxBytes = kRows * kBoxRowBytes;
  alignas(1024) unsigned char first[Shape::kHeadColumns / kBoxColumns][kBoxBytes];
  alignas(1024) unsigned char second[Shape::kValueColumns / kBoxColumns][kBoxBytes];
};

/// What is known of the rows of a stage that both warpgroups read. Statistics are read two at once.
template <int kRows>
struct alignas(2 * sizeof(RowStats<float>)) StageInfo {
  RowStats<float> stats[kRows];
  std::uint64_t live;  // a bit for each row that exists, and sees a key; 1 beyond the rows
};

/// What a block computes at a time.
struct BackwardWork {
  TileWalk<true> walks[kBlockTiles];
  TileRange met;  // by any of the own tiles
  bool exists = false;
};

/// Which of the works comes next, and the parity of the barriers of own tiles for it.
class WorkPosition {
 public:
  static constexpr unsigned kWorks = 3;  // in turns: one is stored, one computed, one announced
  __device__ __forceinline__ unsigned stage() const { return count_ % kWorks; }
  __device__ __forceinline__ unsigned filled() const { return count_ % 2; }
  __device__ __forceinline__ unsigned emptied() const { return filled() ^ 1U; }
  __device__ __forceinline__ void advance() { ++count_; }

 private:
  unsigned count_ = 0;
};

/// Threads that add dq up in turns: an addition takes longer than a tile of rows.
inline constexpr int kDqWriters = 3;

inline constexpr int kBackwardThreads = (1 + kBlockTiles) * kGroupThreads;

template <class Shape>
struct BackwardMemory {
  using OwnPair = OperandPair<Shape, kTile>;
  using StagePair = OperandPair<Shape, Shape::kStepRows>;
  static constexpr int kStages = Shape::kHeadColumns == 64 ? 4 : Shape::kSteps + 1;
  static constexpr int kStepRows = Shape::kStepRows;
  /// Columns of dq that a warpgroup computes.
  static constexpr int kDqColumns = Shape::kHeadColumns / kBlockTiles;
  static constexpr int kDqGroups = kDqColumns / 8;
  static constexpr int kDscoreBytes = kTile * kBoxRowBytes;

  OwnPair own[kBlockTiles];
  StagePair stages[kStages];
  // dS of a tile of rows with each own tile, [row][key]: of this tile and the one before.
  alignas(1024) unsigned char dscores[2][kBlockTiles][kDscoreBytes];
  // dq of a tile of rows, as the registers of the warpgroups' threads have it.
  alignas(128) float4 dq[kBlockTiles][kDqGroups][kGroupThreads];
  StageInfo<Shape::kStepRows> infos[kStages];
  BackwardWork works[WorkPosition::kWorks];
  backward::Band bands[kBlockTiles];  // of each own tile and the first tile of rows
  BufferBarriers own_barriers;
  BufferBarriers barriers[kStages];
  BufferBarriers dscores_barriers[2];
  BufferBarriers dq_barriers[kDqWriters];  // of the one buffer, for each writer
};

/// Slots of kTiles tiles before a sequence, counted from the tiles before it: enough for each
/// sequence to start with a slot, and at most one too many for each.
template <int kTiles = kBlockTiles, class Int>
__host__ __device__ constexpr Int slots_before(Int tiles, Int sequences) {
  return (tiles + sequences * (kTiles - 1)) / kTiles;
}

/// The own tiles of a ticket: a slot of a sequence, and the head or KV head that owns it.
struct OwnTiles {
  int sequence;
  int first;   // tile of the sequence
  int number;  // of tiles of the sequence; none of the slot exists where `first` is not below
  int owner;
};

/// A head's slots come in order, or with the last first; heads_at_once heads have tickets in turns.
/// Counts of slots fit 32 bits: the tickets do.
template <int kTiles, bool kLastFirst>
__device__ inline OwnTiles find_own_tiles(const HopperBackwardParams& hopper,
                                          const std::int64_t* starts, std::int64_t num_owners,
                                          int ticket) {
  const auto slots_of = [&](int sequence) {
    return slots_before<kTiles>(static_cast<int>(starts[sequence]), sequence);
  };
  const auto sequences = static_cast<int>(hopper.backward.call.num_sequences);
  const int slots = slots_of(sequences);
  const int first_head = ticket / (slots * hopper.heads_at_once) * hopper.heads_at_once;
  const int heads = min(hopper.heads_at_once, static_cast<int>(num_owners) - first_head);
  const int inside = ticket - first_head * slots;
  const int owner = first_head + inside % heads;
  const int slot = kLastFirst ? slots - 1 - inside / heads : inside / heads;
  int low = 0;
  int high = sequences;
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    (slots_of(middle) <= slot ? low : high) = middle;
  }
  const auto tiles = static_cast<int>(starts[low + 1] - starts[low]);
  return {low, (slot - slots_of(low)) * kTiles, tiles, owner};
}

/// Finds the own tiles of a ticket. A head's come with the last keys first: dq is added up in that
/// order. A tile that does not exist meets nothing; false where none exists. A function of its own,
/// because the producer has few registers.
__device__ __noinline__ inline bool find_work(const HopperBackwardParams& hopper, int ticket,
                                              BackwardWork& work) {
  const BackwardParams& params = hopper.backward;
  const OwnTiles own = find_own_tiles<kBlockTiles, true>(hopper, params.key_tile_starts,
                                                         params.call.num_kv_heads, ticket);
  if (own.first >= own.number) return false;
  work.met = {};
#pragma unroll 1
  for (int i = 0; i < kBlockTiles; ++i) {
    TileWalk<true>& walk = work.walks[i];
    walk.set(params, own.sequence, own.first + i, own.owner);
    if (own.first + i >= own.number) walk.others = {};
    if (walk.others.begin == walk.others.end) continue;
    const bool is_first = work.met.begin == work.met.end;
    work.met.begin = is_first ? walk.others.begin : min(work.met.begin, walk.others.begin);
    work.met.end = is_first ? walk.others.end : max(work.met.end, walk.others.end);
  }
  work.exists = true;
  return true;
}

/// A bit for each key of a tile that exists.
__device__ inline std::uint64_t live_keys(const Sequence& sequence, std::int32_t tile) {
  const std::int64_t count = sequence.kv_len - std::int64_t{tile} * kTile;
  if (count <= 0) return 0;
  return count >= kTile ? ~std::uint64_t{0} : (std::uint64_t{1} << count) - 1;
}
/// A bit for each row of a tile that exists and sees a key.
__device__ inline std::uint64_t live_rows(const BackwardParams& params, const TileWalk<true>& walk,
                                          std::int32_t head, std::int32_t tile) {
  return params.live_rows[head * params.num_row_tiles + walk.row_tile_start + tile];
}

/// Blocks of keys up to the last one that a tile of rows meets.
__device__ inline std::int32_t end_of_blocks(const ScoreRules& rules, const Sequence& sequence,
                                             std::int32_t row_tile) {
  const TileRange keys = backward::key_tiles_seen(rules, sequence, row_tile);
  return (keys.end + kBlockTiles - 1) / kBlockTiles;
}

}  // namespace ladon::cuda::hopper
