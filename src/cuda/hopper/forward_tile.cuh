// Tiles of Hopper's forward kernel: which rows and blocks of keys they are, and the shared memory
// that they go through.
#pragma once

#include <cstdint>

#include "cuda/hopper/barrier.cuh"
#include "cuda/hopper/bulk_copy.cuh"
#include "cuda/hopper/forward_params.h"
#include "cuda/hopper/forward_shape.h"
#include "cuda/hopper/wgmma.cuh"

namespace ladon::cuda::hopper {

struct ForwardTile {
  int sequence = -1;    // negative: there is no more work
  int first_token = 0;  // negative where its first rows do not exist
  RowHeads heads;
};

/// Blocks of keys of a tile.
struct TileBlocks {
  BlockRange copied;  // those that any row sees
  // Of rows of each warpgroup:
  BlockRange seen[kMostConsumers];
  BlockRange whole[kMostConsumers];  // those that need no mask
};

/// What is known of a tile that is copied and computed.
struct AnnouncedTile {
  ForwardTile tile;
  TileBlocks blocks;
  Sequence sequence;
  // Its first rows in the tensor maps.
  int kv_head;
  int query_row;
  int key_row;
  int value_row;
  int out_row;
};

/// Where a warp puts 16 finished rows together, so many groups of 8 columns at a time, before lanes
/// next to each other copy what is next to each other in global memory. Behind each row is the
/// address that it goes to; with it, eight rows are in different banks.
template <int kGroupsAtOnce>
struct RowStaging {
  static constexpr int kRows = kStoredRows;
  static constexpr int kAtOnce = kGroupsAtOnce;
  static constexpr int kStride = kAtOnce * 16 + 16;
  static constexpr int kBytes = kRows * kStride;

  template <class Half>
  __device__ __forceinline__ static Half** place(unsigned char* staging, int row) {
    return reinterpret_cast<Half**>(staging + row * kStride + kAtOnce * 16);
  }
  template <class Half>
  __device__ __forceinline__ static Half* const* place(const unsigned char* staging, int row) {
    return reinterpret_cast<Half* const*>(staging + row * kStride + kAtOnce * 16);
  }
};

template <int kHead, int kValue, ForwardRules kRules = ForwardRules::kWindow>
struct ForwardMemory {
  using Shape = ForwardShape<kHead, kValue, kRules>;
  static constexpr int kHeadBoxes = kHead / kBoxColumns;
  static constexpr int kValueBoxes = kValue / kBoxColumns;
  // Of one box.
  static constexpr int kQueryBytes = Shape::kTileRows * kBoxRowBytes;
  static constexpr int kBlockBytes = kBlockKeys * kBoxRowBytes;

  alignas(1024) unsigned char queries[Shape::kQueryStages][kHeadBoxes][kQueryBytes];
  alignas(1024) unsigned char keys[Shape::kKeyStages][kHeadBoxes][kBlockBytes];
  alignas(1024) unsigned char values[Shape::kValueStages][kValueBoxes][kBlockBytes];
  // Sums of earlier segments, by warp. Between tiles its rows are put together there, and may be
  // stored by the copy engine.
  static constexpr bool kStoresBoxes = Shape::kSumsInShared;
  static constexpr int kGroups = kValue / 8;
  static constexpr int kWarps = Shape::kConsumers * 4;
  alignas(1024) float4 earlier[Shape::kSumsInShared ? kWarps * kGroups : 1][32];
  // Where they are in global memory, rows have a place of their own.
  using Staging = RowStaging<Shape::kSumsInShared ? kGroups : 8>;
  alignas(16) unsigned char rows[Shape::kSumsInShared ? 1 : kWarps * Staging::kBytes];
  BufferBarriers query_barriers[Shape::kQueryStages];
  BufferBarriers key_barriers[Shape::kKeyStages];
  BufferBarriers value_barriers[Shape::kValueStages];
  BufferBarriers plan_barriers;
  // In turns: one is planned, one is copied, one or two have queries here, one is stored.
  static constexpr int kTiles = Shape::kQueryStages + 3;
  AnnouncedTile tiles[kTiles];

  /// Where a warp puts finished rows together.
  __device__ __forceinline__ unsigned char* staging(int warp) {
    if constexpr (!Shape::kSumsInShared) return rows + warp * Staging::kBytes;
    static_assert(Staging::kBytes <= sizeof earlier[0] * kGroups);
    return reinterpret_cast<unsigned char*>(earlier[warp * kGroups]);
  }
};

/// Tile number `ticket`: within a section of columns (sequences and heads) whose keys and values
/// fit in the L2 cache, all columns' last tiles come first. Those are the longest of causal calls,
/// and the short ones fill the gaps at the end. Tiles are cut from a sequence's end, so that the
/// one that has fewer rows is the first, which sees the fewest keys; but warpgroups' rows begin
/// where blocks of keys do.
template <int kTileRows>
__device__ __forceinline__ ForwardTile tile_of(const ForwardSchedule& schedule,
                                               const Sequence* sequences, int ticket) {
  const int per_section = schedule.section_columns * schedule.row_tiles;
  const int section = ticket / per_section;
  const int first_column = section * schedule.section_columns;
  const int columns = min(schedule.section_columns, schedule.columns - first_column);
  const int place = ticket - section * per_section;
  const int column = first_column + place % columns;
  const int packs = schedule.num_heads / schedule.packed_heads;
  const int sequence = column / packs;
  const int together = schedule.packed_heads == 1 ? kGroupRows : 1;
  const int tokens = static_cast<int>(sequences[sequence].query_len);
  const int end = (tokens + together - 1) / together * together;
  return {sequence,
          end - (place / columns + 1) * (kTileRows / schedule.packed_heads),
          {column % packs * schedule.packed_heads, schedule.packed_heads}};
}

/// See uniform() of wgmma.cuh.
__device__ __forceinline__ BlockRange uniform(const BlockRange& blocks) {
  return {uniform(blocks.begin), uniform(blocks.end)};
}
/// The queries of a tile's rows [first_row, last_row] that exist; none where last < first.
struct TokenRange {
  std::int64_t first;
  std::int64_t last;
};
__device__ __forceinline__ TokenRange tokens_of_rows(const Sequence& sequence,
                                                     const ForwardTile& tile, int first_row,
                                                     int last_row) {
  const std::int64_t first = tile.first_token + first_row / tile.heads.heads;
  const std::int64_t last = tile.first_token + last_row / tile.heads.heads;
  return {first > 0 ? first : 0, last < sequence.query_len ? last : sequence.query_len - 1};
}
__device__ __forceinline__ BlockRange blocks_of(const AttentionParams& call,
                                                const Sequence& sequence,
                                                const TokenRange& tokens) {
  if (tokens.last < tokens.first) return {};
  return visible_blocks(call.rules, sequence, tokens.first, tokens.last);
}

/// Rows that see no key compute a block of masked ones: every tile then takes the same path.
__device__ __forceinline__ BlockRange some_blocks(const BlockRange& blocks,
                                                  const BlockRange& others) {
  if (blocks.begin < blocks.end) return blocks;
  return {others.begin, others.begin + 1};
}

}  // namespace ladon::cuda::hopper
