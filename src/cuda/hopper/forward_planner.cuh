// The thread of Hopper's forward kernel that works out what is to be known of each tile, while
// another one copies and the warpgroups compute.
#pragma once

#include "cuda/hopper/forward_tile.cuh"

namespace ladon::cuda::hopper {

/// The thread that plans. It has few registers: what it knows of a tile is in shared memory.
template <int kHead, int kValue, ForwardRules kRules>
class ForwardPlanner {
 public:
  using Memory = ForwardMemory<kHead, kValue, kRules>;
  using Shape = typename Memory::Shape;

  __device__ __forceinline__ ForwardPlanner(const HopperForwardParams& params, Memory& memory)
      : params_(params), call_(params.forward.call), memory_(memory) {}

  __device__ __forceinline__ void run() {
    int ticket = static_cast<int>(blockIdx.x);
    while (plan(ticket)) ticket = next_ticket();
  }

 private:
  /// What is in memory is not kept in registers from here on.
  __device__ __forceinline__ static void forget_registers() { asm volatile("" ::: "memory"); }

  __device__ __forceinline__ int next_ticket() const {
    return static_cast<int>(gridDim.x) + atomicAdd(params_.next_ticket, 1);
  }

  /// Plans the next tile, that of `ticket` or of a later one; or says that there is none.
  __device__ __forceinline__ bool plan(int ticket) {
    const bool has_tile = note_tile(ticket);
    memory_.plan_barriers.full.arrive();
    memory_.plan_barriers.empty.wait(plan_.filled());
    plan_.advance();
    tiles_.advance();
    return has_tile;
  }

  /// Whether there was a tile to note.
  __device__ __forceinline__ bool note_tile(int ticket) {
    AnnouncedTile& noted = memory_.tiles[tiles_.stage()];
    for (; ticket < params_.schedule.columns * params_.schedule.row_tiles; ticket = next_ticket()) {
      noted.tile = tile_of<Shape::kTileRows>(params_.schedule, call_.sequences, ticket);
      if (noted.tile.first_token <= -Shape::kTileRows / noted.tile.heads.heads) continue;
      forget_registers();
      note_blocks(noted);
      forget_registers();
      note_rows(noted);
      return true;
    }
    noted.tile = {};
    return false;
  }

  /// For the warpgroups, so that they need not compute it before their first product.
  __device__ __forceinline__ void note_blocks(AnnouncedTile& noted) const {
    const Sequence& sequence = call_.sequences[noted.tile.sequence];
    // What they look at.
    Sequence& copy = noted.sequence;
    copy.query_len = sequence.query_len;
    copy.kv_len = sequence.kv_len;
    copy.position_offset = sequence.position_offset;
    copy.key_origin = sequence.key_origin;
    copy.out = sequence.out;
    copy.lse = sequence.lse;
    if constexpr (kRules == ForwardRules::kAll) {
      copy.index = sequence.index;
      copy.dropout_index = sequence.dropout_index;
    }
    forget_registers();
    TileBlocks& blocks = noted.blocks;
    blocks.copied = some_blocks(
        blocks_of(call_, copy, tokens_of_rows(copy, noted.tile, 0, Shape::kTileRows - 1)), {});
#pragma unroll 1
    for (int group = 0; group < Shape::kConsumers; ++group) {
      forget_registers();
      const TokenRange tokens =
          tokens_of_rows(copy, noted.tile, group * kGroupRows, (group + 1) * kGroupRows - 1);
      blocks.seen[group] = some_blocks(blocks_of(call_, copy, tokens), blocks.copied);
      blocks.whole[group] = whole_blocks(call_.rules, copy, tokens.first, tokens.last);
    }
  }

  /// Where the tile begins in the tensor maps.
  __device__ __forceinline__ void note_rows(AnnouncedTile& noted) const {
    const Sequence& sequence = call_.sequences[noted.tile.sequence];
    noted.kv_head = noted.tile.heads.first / static_cast<int>(call_.group);
    noted.query_row = static_cast<int>(sequence.q / call_.q.token_stride) + noted.tile.first_token;
    noted.out_row =
        static_cast<int>(sequence.out / call_.out.token_stride) + noted.tile.first_token;
    // Where the sequence would have its token 0.
    const int origin = static_cast<int>(sequence.first_slot - sequence.key_origin);
    const int first_key = noted.blocks.copied.begin * kBlockKeys;
    noted.key_row = static_cast<int>(sequence.k / call_.k.token_stride) + origin + first_key;
    noted.value_row = static_cast<int>(sequence.v / call_.v.token_stride) + origin + first_key;
  }

  const HopperForwardParams& params_;
  const AttentionParams& call_;
  Memory& memory_;
  RingPosition<1> plan_;
  RingPosition<Memory::kTiles> tiles_;
};

}  // namespace ladon::cuda::hopper
