// The thread of Hopper's forward kernel that copies queries, keys and values to shared memory.
#pragma once

#include "cuda/hopper/forward_tile.cuh"

namespace ladon::cuda::hopper {

/// The thread that copies.
template <int kColumns>
class ForwardProducer {
 public:
  using Memory = ForwardMemory<kColumns>;

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
    memory_.query_barriers.empty.wait(queries_.emptied());
    memory_.tiles[queries_.filled()] = tile;
    memory_.query_barriers.full.arrive_expecting(bytes);
    queries_.advance();
  }

  __device__ __forceinline__ void copy_tile(const ForwardTile& tile, const Sequence& sequence) {
    const int key_row = static_cast<int>(sequence.k / call_.k.token_stride + sequence.first_slot);
    const int value_row = static_cast<int>(sequence.v / call_.v.token_stride + sequence.first_slot);
    const int query_row = static_cast<int>(sequence.q / call_.q.token_stride) + tile.first_token;
    const int kv_head = tile.heads.first / static_cast<int>(call_.group);
    const BlockRange blocks =
        blocks_of(call_, sequence, tokens_of_rows(sequence, tile, 0, kTileRows - 1));
    const int origin = static_cast<int>(sequence.key_origin);

    // The first keys come before the queries, whose buffer is in use until the last tile's last
    // scores.
    const int first_row = first_pair(blocks) * kBlockKeys - origin;
    if (blocks.begin < blocks.end) {
      copy_rows(memory_.keys, memory_.key_barriers, keys_, params_.k, key_row + first_row, kv_head);
    }
    announce(tile, sizeof memory_.queries);
    for (int box = 0; box < Memory::kBoxes; ++box) {
      copy_box(shared_address(memory_.queries[box]), params_.q, box * kBoxColumns, tile.heads.first,
               query_row, memory_.query_barriers.full);
    }
    for (int pair = first_pair(blocks); pair < blocks.end; pair += 2) {
      const int row = pair * kBlockKeys - origin;
      if (row != first_row) {
        copy_rows(memory_.keys, memory_.key_barriers, keys_, params_.k, key_row + row, kv_head);
      }
      for (int half = 0; half < 2; ++half) {
        copy_rows(memory_.values, memory_.value_barriers, values_, params_.v,
                  value_row + row + half * kBlockKeys, kv_head);
      }
    }
  }

  /// Fills the ring's next buffer.
  template <int kStages, int kBytes>
  __device__ __forceinline__ void copy_rows(
      unsigned char (&buffers)[kStages][Memory::kBoxes][kBytes],
      BufferBarriers (&barriers)[kStages], RingPosition<kStages>& ring, const CUtensorMap& map,
      int row, int head) {
    BufferBarriers& barrier = barriers[ring.stage()];
    barrier.empty.wait(ring.emptied());
    barrier.full.arrive_expecting(sizeof buffers[0]);
    for (int box = 0; box < Memory::kBoxes; ++box) {
      copy_box(shared_address(buffers[ring.stage()][box]), map, box * kBoxColumns, row, head,
               barrier.full);
    }
    ring.advance();
  }

  const HopperForwardParams& params_;
  const AttentionParams& call_;
  Memory& memory_;
  RingPosition<1> queries_;
  RingPosition<Memory::kKeyStages> keys_;
  RingPosition<Memory::kValueStages> values_;
};

}  // namespace ladon::cuda::hopper
