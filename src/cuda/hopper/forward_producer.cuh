// The thread of Hopper's forward kernel that copies queries, keys and values to shared memory.
#pragma once

#include "cuda/hopper/forward_tile.cuh"

namespace ladon::cuda::hopper {

/// The thread that copies. It has few registers: what it knows of a tile is in shared memory.
template <int kHead, int kValue, ForwardRules kRules>
class ForwardProducer {
 public:
  using Memory = ForwardMemory<kHead, kValue, kRules>;
  using Shape = typename Memory::Shape;

  __device__ __forceinline__ ForwardProducer(const HopperForwardParams& params, Memory& memory)
      : params_(params), call_(params.forward.call), memory_(memory) {}

  __device__ __forceinline__ void run() {
    prefetch_map(params_.q);
    prefetch_map(params_.k);
    prefetch_map(params_.v);
    bool has_tile = note_tile(static_cast<int>(blockIdx.x));
    while (has_tile) {
      start_tile();
      // It takes a while, and the queries of the next tile are to be there when this one is done.
      has_tile = note_tile(next_ticket());
      forget_registers();
      finish_tile();
    }
    announce(0);
  }

 private:
  /// What is in memory is not kept in registers from here on.
  __device__ __forceinline__ static void forget_registers() { asm volatile("" ::: "memory"); }

  /// Gives the next tile to the warpgroups, with so many bytes of queries to come.
  __device__ __forceinline__ void announce(int bytes) {
    BufferBarriers& barriers = memory_.query_barriers[query_stage()];
    barriers.empty.wait((announced_ / Shape::kQueryStages & 1U) ^ 1U);
    barriers.full.arrive_expecting(bytes);
  }
  /// The last tile that used this place was stored before the one in work was begun.
  __device__ __forceinline__ AnnouncedTile& next_tile() {
    return memory_.tiles[announced_ % Memory::kTiles];
  }
  __device__ __forceinline__ unsigned query_stage() const {
    return announced_ % Shape::kQueryStages;
  }

  __device__ __forceinline__ int next_ticket() const {
    return static_cast<int>(gridDim.x) + atomicAdd(params_.next_ticket, 1);
  }

  /// Notes what is to be known of the next tile, that of `ticket` or of a later one, if there is
  /// one.
  __device__ __forceinline__ bool note_tile(int ticket) {
    AnnouncedTile& noted = next_tile();
    for (; ticket < params_.schedule.columns * params_.schedule.row_tiles; ticket = next_ticket()) {
      noted.tile = tile_of<Shape::kTileRows>(params_.schedule, ticket);
      forget_registers();
      if (noted.tile.first_token >= call_.sequences[noted.tile.sequence].query_len) continue;
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
    // Where the sequence would have its token 0.
    const int origin = static_cast<int>(sequence.first_slot - sequence.key_origin);
    const int first_key = noted.blocks.copied.begin * kBlockKeys;
    noted.key_row = static_cast<int>(sequence.k / call_.k.token_stride) + origin + first_key;
    noted.value_row = static_cast<int>(sequence.v / call_.v.token_stride) + origin + first_key;
  }

  // Blocks of a tile that are copied before the next tile is worked out: enough to compute
  // with meanwhile.
  static constexpr int kFirstBlocks = 2;

  /// Copies the queries, and the first keys and values.
  __device__ __forceinline__ void start_tile() {
    const AnnouncedTile& noted = next_tile();
    // Where queries have one buffer, which is in use until the last tile's last scores, the first
    // keys come before them.
    if constexpr (Shape::kQueryStages == 1) copy_keys(noted, 0);
    announce(sizeof memory_.queries[0]);
#pragma unroll 1
    for (int box = 0; box < Memory::kHeadBoxes; ++box) {
      copy_box(shared_address(memory_.queries[query_stage()][box]), params_.q, box * kBoxColumns,
               noted.tile.heads.first, noted.query_row, memory_.query_barriers[query_stage()].full);
    }
    if constexpr (Shape::kQueryStages > 1) copy_keys(noted, 0);
    ++announced_;
    for (int i = 0; i < min(kFirstBlocks, count_blocks(noted)); ++i) copy_block(noted, i);
  }
  /// Copies the rest of the keys and values.
  __device__ __forceinline__ void finish_tile() {
    const AnnouncedTile& noted = memory_.tiles[(announced_ - 1) % Memory::kTiles];
    const int blocks = count_blocks(noted);
    for (int i = kFirstBlocks; i < blocks; ++i) copy_block(noted, i);
  }

  __device__ __forceinline__ static int count_blocks(const AnnouncedTile& noted) {
    return noted.blocks.copied.end - noted.blocks.copied.begin;
  }
  /// A block's values, and the keys of the next one, which are needed before them.
  __device__ __forceinline__ void copy_block(const AnnouncedTile& noted, int block) {
    if (block + 1 < count_blocks(noted)) copy_keys(noted, block + 1);
    copy_rows(memory_.values, memory_.value_barriers, values_, params_.v,
              noted.value_row + block * kBlockKeys, noted.kv_head);
    ++values_;
  }
  __device__ __forceinline__ void copy_keys(const AnnouncedTile& noted, int block) {
    copy_rows(memory_.keys, memory_.key_barriers, keys_, params_.k,
              noted.key_row + block * kBlockKeys, noted.kv_head);
    ++keys_;
  }

  /// Fills the ring's buffer number `count`.
  template <int kStages, int kBoxes, int kBytes>
  __device__ __forceinline__ static void copy_rows(
      unsigned char (&buffers)[kStages][kBoxes][kBytes], BufferBarriers (&barriers)[kStages],
      unsigned count, const CUtensorMap& map, int row, int head) {
    const unsigned stage = count % kStages;
    barriers[stage].empty.wait((count / kStages & 1U) ^ 1U);
    barriers[stage].full.arrive_expecting(sizeof buffers[0]);
#pragma unroll 1
    for (int box = 0; box < kBoxes; ++box) {
      copy_box(shared_address(buffers[stage][box]), map, box * kBoxColumns, row, head,
               barriers[stage].full);
    }
  }

  const HopperForwardParams& params_;
  const AttentionParams& call_;
  Memory& memory_;
  unsigned announced_ = 0;  // tiles
  unsigned keys_ = 0;       // buffers
  unsigned values_ = 0;
};

}  // namespace ladon::cuda::hopper
