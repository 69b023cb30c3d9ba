// Tiles of Hopper's forward kernel: which rows and blocks of keys they are, and the shared memory
// that they go through.
#pragma once

#include <cstdint>

#include "cuda/hopper/barrier.cuh"
#include "cuda/hopper/bulk_copy.cuh"
#include "cuda/hopper/forward_params.h"
#include "cuda/hopper/wgmma.cuh"

namespace ladon::cuda::hopper {

inline constexpr int kConsumers = kTileRows / kGroupRows;
inline constexpr int kForwardThreads = (1 + kConsumers) * kGroupThreads;

struct ForwardTile {
  int sequence = -1;  // negative: there is no more work
  int first_token = 0;
  RowHeads heads;
};

/// Blocks of keys of a tile.
struct TileBlocks {
  BlockRange copied;            // those that any row sees
  BlockRange seen[kConsumers];  // by rows of each warpgroup
};

/// What the warpgroups that compute a tile know of it.
struct AnnouncedTile {
  ForwardTile tile;
  TileBlocks blocks;
  Sequence sequence;
};

/// kHead and kValue: columns of K and of V, which may be more than the heads have.
template <int kHead, int kValue>
struct ForwardMemory {
  static constexpr int kHeadBoxes = kHead / kBoxColumns;
  static constexpr int kValueBoxes = kValue / kBoxColumns;
  // Blocks of keys in a buffer: large copies are faster, but long heads leave room for two.
  static constexpr int kKeyBlocks = kHead > 128 ? 1 : 2;
  static constexpr int kKeyStages = kHead == 64 ? 4 : 2;
  static constexpr int kValueStages = kHead == 64 ? 8 : 4;
  // Of one box.
  static constexpr int kQueryBytes = kTileRows * kBoxRowBytes;
  static constexpr int kKeyBytes = kKeyBlocks * kBlockKeys * kBoxRowBytes;
  static constexpr int kValueBytes = kBlockKeys * kBoxRowBytes;

  alignas(1024) unsigned char queries[kHeadBoxes][kQueryBytes];
  alignas(1024) unsigned char keys[kKeyStages][kHeadBoxes][kKeyBytes];
  alignas(1024) unsigned char values[kValueStages][kValueBoxes][kValueBytes];
  float4 earlier[kConsumers * 4][kValue / 8][32];  // sums of earlier segments, by warp
  BufferBarriers query_barriers;
  BufferBarriers key_barriers[kKeyStages];
  BufferBarriers value_barriers[kValueStages];
  // In turns: one is stored and one computed while the next is prepared.
  static constexpr int kTiles = 3;
  AnnouncedTile tiles[kTiles];
};

/// Tile number `ticket`: within a section of columns (sequences and heads) whose keys and values
/// fit in the L2 cache, all columns' last tiles come first. Those are the longest of causal calls,
/// and the short ones fill the gaps at the end.
__device__ __forceinline__ ForwardTile tile_of(const ForwardSchedule& schedule, int ticket) {
  const int per_section = schedule.section_columns * schedule.row_tiles;
  const int section = ticket / per_section;
  const int first_column = section * schedule.section_columns;
  const int columns = min(schedule.section_columns, schedule.columns - first_column);
  const int place = ticket - section * per_section;
  const int row_tile = schedule.row_tiles - 1 - place / columns;
  const int column = first_column + place % columns;
  const int packs = schedule.num_heads / schedule.packed_heads;
  return {column / packs,
          row_tile * (kTileRows / schedule.packed_heads),
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
  const std::int64_t last = tile.first_token + last_row / tile.heads.heads;
  return {tile.first_token + first_row / tile.heads.heads,
          last < sequence.query_len ? last : sequence.query_len - 1};
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

/// Keys come in pairs of blocks: the first pair that holds some of them.
__device__ __forceinline__ int first_pair(const BlockRange& blocks) { return blocks.begin / 2 * 2; }

}  // namespace ladon::cuda::hopper
