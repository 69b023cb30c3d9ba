// The thread of Hopper's forward kernel that copies queries, keys and values to shared memory.
#pragma once

#include "cuda/hopper/forward_tile.cuh"

namespace ladon::cuda::hopper {

/// The thread that copies.
template <int kHead, int kValue>
class ForwardProducer {
 public:
  using Memory = ForwardMemory<kHead, kValue>;

  __device__ __forceinline__ ForwardProducer(const HopperForwardParams& params, Memory& memory)
      : params_(params), call_(params.forward.call), memory_(memory) {}

  __device__ __forceinline__ void run() {
    prefetch_map(params_.q);
    prefetch_map(params_.k);
    prefetch_map(params_.v);
    const int tickets = params_.schedule.columns * params_.schedule.row_tiles;
    int ticket = static_cast<int>(blockIdx.x);
    while (ticket < tickets) {
      const ForwardTile tile = tile_of(params_.schedule, ticket);
      const Sequence& sequence = call_.sequences[tile.sequence];
      ticket = tile.first_token < sequence.query_len ? copy_tile(tile, sequence) : next_ticket();
    }
    announce({}, 0);
  }

 private:
  /// Gives the tile to the warpgroups, with so many bytes of queries to come.
  __device__ __forceinline__ const AnnouncedTile& announce(const ForwardTile& tile, int bytes) {
    AnnouncedTile& announced = next_tile();
    announced.tile = tile;
    // One buffer: its phases alternate.
    memory_.query_barriers.empty.wait((announced_ & 1U) ^ 1U);
    memory_.query_barriers.full.arrive_expecting(bytes);
    ++announced_;
    return announced;
  }
  __device__ __forceinline__ AnnouncedTile& next_tile() {
    return memory_.tiles[announced_ % Memory::kTiles];
  }

  __device__ __forceinline__ int next_ticket() const {
    return static_cast<int>(gridDim.x) + atomicAdd(params_.next_ticket, 1);
  }

  /// Returns the next ticket, which is drawn ahead of the last copies.
  __device__ __forceinline__ int copy_tile(const ForwardTile& tile, const Sequence& sequence) {
    const BlockRange blocks = some_blocks(
        blocks_of(call_, sequence, tokens_of_rows(sequence, tile, 0, kTileRows - 1)), {});
    // The first keys come before the queries, whose buffer is in use until the last tile's last
    // scores.
    int key_row = row_of(sequence, sequence.k, call_.k) + first_pair(blocks) * kBlockKeys;
    copy_rows(memory_.keys, memory_.key_barriers, keys_, params_.k, key_row,
              tile.heads.first / static_cast<int>(call_.group));
    note_blocks(tile, sequence, blocks);
    // Registers are few: what is in memory is not kept in them, and the rest is computed only now.
    const AnnouncedTile& announced = announce(tile, sizeof memory_.queries);
    const int first_head = announced.tile.heads.first;
    const int query_row =
        static_cast<int>(sequence.q / call_.q.token_stride) + announced.tile.first_token;
#pragma unroll 1
    for (int box = 0; box < Memory::kHeadBoxes; ++box) {
      copy_box(shared_address(memory_.queries[box]), params_.q, box * kBoxColumns, first_head,
               query_row, memory_.query_barriers.full);
    }
    const int kv_head = first_head / static_cast<int>(call_.group);
    const BlockRange copied = announced.blocks.copied;
    const int next = next_ticket();
    int value_row = row_of(sequence, sequence.v, call_.v) + first_pair(copied) * kBlockKeys;
    // Keys are needed a block ahead of values.
    constexpr int kKeys = Memory::kKeyBlocks * kBlockKeys;  // of a buffer
    const int pairs = (copied.end - first_pair(copied) + 1) / 2;
    for (int left = pairs * 2 / Memory::kKeyBlocks; left > 0; --left) {
      if (left > 1) {
        key_row += kKeys;
        copy_rows(memory_.keys, memory_.key_barriers, keys_, params_.k, key_row, kv_head);
      }
      for (int block = 0; block < Memory::kKeyBlocks; ++block) {
        copy_rows(memory_.values, memory_.value_barriers, values_, params_.v, value_row, kv_head);
        value_row += kBlockKeys;
      }
    }
    return next;
  }

  /// Where the sequence would have its token 0, as a row of the tensor map.
  __device__ __forceinline__ static int row_of(const Sequence& sequence, std::int64_t start,
                                               const Operand& operand) {
    return static_cast<int>(start / operand.token_stride + sequence.first_slot -
                            sequence.key_origin);
  }

  /// For the warpgroups, so that they need not compute it before their first product. The last tile
  /// that used this place was stored before the one in work was begun.
  __device__ __forceinline__ void note_blocks(const ForwardTile& tile, const Sequence& sequence,
                                              const BlockRange& copied) {
    // What they look at. A copy of it all would take too many registers.
    Sequence& copy = next_tile().sequence;
    copy.query_len = sequence.query_len;
    copy.kv_len = sequence.kv_len;
    copy.position_offset = sequence.position_offset;
    copy.key_origin = sequence.key_origin;
    copy.out = sequence.out;
    copy.lse = sequence.lse;
    TileBlocks& blocks = next_tile().blocks;
    blocks.copied = copied;
#pragma unroll 1
    for (int group = 0; group < kConsumers; ++group) {
      const TokenRange tokens =
          tokens_of_rows(sequence, tile, group * kGroupRows, (group + 1) * kGroupRows - 1);
      blocks.seen[group] = some_blocks(blocks_of(call_, sequence, tokens), copied);
    }
  }

  /// Fills the ring's next buffer.
  template <int kStages, int kBoxes, int kBytes>
  __device__ __forceinline__ void copy_rows(unsigned char (&buffers)[kStages][kBoxes][kBytes],
                                            BufferBarriers (&barriers)[kStages],
                                            RingPosition<kStages>& ring, const CUtensorMap& map,
                                            int row, int head) {
    BufferBarriers& barrier = barriers[ring.stage()];
    barrier.empty.wait(ring.emptied());
    barrier.full.arrive_expecting(sizeof buffers[0]);
    for (int box = 0; box < kBoxes; ++box) {
      copy_box(shared_address(buffers[ring.stage()][box]), map, box * kBoxColumns, row, head,
               barrier.full);
    }
    ring.advance();
  }

  const HopperForwardParams& params_;
  const AttentionParams& call_;
  Memory& memory_;
  unsigned announced_ = 0;  // tiles
  RingPosition<Memory::kKeyStages> keys_;
  RingPosition<Memory::kValueStages> values_;
};

}  // namespace ladon::cuda::hopper
