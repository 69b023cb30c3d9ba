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
    for (int ticket = static_cast<int>(blockIdx.x); ticket < tickets;
         ticket = static_cast<int>(gridDim.x) + atomicAdd(params_.next_ticket, 1)) {
      const ForwardTile tile = tile_of(params_.schedule, ticket);
      const Sequence& sequence = call_.sequences[tile.sequence];
      if (tile.first_token < sequence.query_len) copy_tile(tile, sequence);
    }
    announce({}, 0);
  }

 private:
  /// Gives the tile to the warpgroups, with so many bytes of queries to come.
  __device__ __forceinline__ void announce(const ForwardTile& tile, int bytes) {
    memory_.tiles[tiles_.stage()].tile = tile;
    tiles_.advance();
    memory_.query_barriers.empty.wait(queries_.emptied());
    memory_.query_barriers.full.arrive_expecting(bytes);
    queries_.advance();
  }

  __device__ __forceinline__ void copy_tile(const ForwardTile& tile, const Sequence& sequence) {
    const BlockRange blocks = some_blocks(
        blocks_of(call_, sequence, tokens_of_rows(sequence, tile, 0, kTileRows - 1)), {});
    const int kv_head = tile.heads.first / static_cast<int>(call_.group);
    const int first_key = first_pair(blocks) * kBlockKeys;
    // The first keys come before the queries, whose buffer is in use until the last tile's last
    // scores.
    int key_row = row_of(sequence, sequence.k, call_.k) + first_key;
    copy_rows(memory_.keys, memory_.key_barriers, keys_, params_.k, key_row, kv_head);
    note_blocks(tile, sequence, blocks);
    announce(tile, sizeof memory_.queries);
    // Only now: registers are few.
    const int query_row = static_cast<int>(sequence.q / call_.q.token_stride) + tile.first_token;
    for (int box = 0; box < Memory::kHeadBoxes; ++box) {
      copy_box(shared_address(memory_.queries[box]), params_.q, box * kBoxColumns, tile.heads.first,
               query_row, memory_.query_barriers.full);
    }
    int value_row = row_of(sequence, sequence.v, call_.v) + first_key;
    for (int key = first_key; key < blocks.end * kBlockKeys; key += 2 * kBlockKeys) {
      if (key != first_key) {
        key_row += 2 * kBlockKeys;
        copy_rows(memory_.keys, memory_.key_barriers, keys_, params_.k, key_row, kv_head);
      }
      for (int block = 0; block < 2; ++block) {
        copy_rows(memory_.values, memory_.value_barriers, values_, params_.v, value_row, kv_head);
        value_row += kBlockKeys;
      }
    }
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
    TileBlocks& blocks = memory_.tiles[tiles_.stage()].blocks;
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
  RingPosition<Memory::kTiles> tiles_;
  RingPosition<1> queries_;
  RingPosition<Memory::kKeyStages> keys_;
  RingPosition<Memory::kValueStages> values_;
};

}  // namespace ladon::cuda::hopper
