// dq on Hopper, bf16 with a scale and a window, heads and values up to 256 (padded with zeros).
//
//   S = Q K^T,  dP = dO V^T,  dQ += dS K
//
// A block owns 128 rows of a head, 64 for each of two warpgroups, whose q and dout stay in shared
// memory; tiles of 64 keys come through two stages and their values through one, which the
// products of dQ do not read. Each warpgroup works for itself: dS is the operand A of dQ in its
// registers. The products of dQ and of the next S and dP follow each other without a gap, so that
// one warpgroup's softmax runs during the other's products.
//
// Keys come in the order of TileWalk, in one chain (MmaDims::kOneChain), so the bits are those of
// backward_mma.cuh. The careful kernels there compute tiles that meet NaN or infinity once more.
//
// Registers: 128 accumulators, 64 scores and 12 of held q, of 232; operand A has the registers of
// dP. Shared memory 225 KB: own rows 128, stages 96. By count, a tile of keys is 3072 cycles of
// tensor cores for both warpgroups and 2976 of the shared memory's port (scores 1952, sums 512,
// copies 512). It takes about 4300 by the time at S16384. H200, TFLOP/s counted as five products
// (this kernel computes three), in the cases of backward_wide_keys.cuh: 1101, 914 and 1036.
//
// Tried and lost: dP of the next tile started with its S, during dQ (serialised for want of
// registers); 4 held steps (the same).
#pragma once

#include "cuda/hopper/backward_dq_products.cuh"
#include "cuda/hopper/backward_products.cuh"
#include "cuda/hopper/backward_scores.cuh"
#include "cuda/hopper/backward_store.cuh"
#include "cuda/hopper/backward_wide_tile.cuh"
#include "cuda/kernels/backward_fragments.cuh"

namespace ladon::cuda::hopper {

struct WideRowsWork {
  TileWalk<false> walk;  // of the first own tile, over what any of them meets
  FirstRows rows;
  TileRange seen[kRowTiles];  // by each of them
  Band bands[kRowTiles];      // of each own tile and the first keys
  bool exists = false;
};

struct WideRowsMemory {
  static constexpr int kStages = 2;

  struct OwnRows {
    WideTile queries;
    WideTile douts;
  };
  static constexpr int kOwnBytes = kRowTiles * static_cast<int>(sizeof(OwnRows));

  OwnRows own[kRowTiles];
  WideTile keys[kStages];
  WideTile values;
  WideRowsWork works[WorkPosition::kWorks];
  BufferBarriers own_barriers;
  BufferBarriers key_barriers[kStages];
  BufferBarriers value_barriers;
  std::uint32_t unused;
};

/// Tickets have the last rows first: under a causal mask those have the most to do. False where
/// neither tile exists. A function of its own, because the producer has few registers.
__device__ __noinline__ inline bool find_wide_rows(const HopperBackwardParams& hopper, int ticket,
                                                   WideRowsWork& work) {
  const BackwardParams& params = hopper.backward;
  const OwnTiles own = find_own_tiles<kRowTiles, true>(hopper, params.row_tile_starts,
                                                       params.call.num_heads, ticket);
  if (own.first >= own.number) return false;
  TileWalk<false>& walk = work.walk;
  walk.set(params, own.sequence, own.first, own.owner);
  find_first_rows(params.call, walk.sequence, work.rows);
  TileRange met = {};
#pragma unroll 1
  for (int i = 0; i < kRowTiles; ++i) {
    const int tile = own.first + i;
    const TileRange seen = tile < own.number
                               ? backward::key_tiles_seen(params.call.rules, walk.sequence, tile)
                               : TileRange{};
    work.seen[i] = seen;
    work.bands[i] =
        Band(params.call.rules, walk.sequence, std::int64_t{tile} * kTile, 0, kFarthest);
    if (seen.begin == seen.end) continue;
    const bool is_first = met.begin == met.end;
    met.begin = is_first ? seen.begin : min(met.begin, seen.begin);
    met.end = is_first ? seen.end : max(met.end, seen.end);
  }
  walk.others = met;
  work.exists = true;
  return true;
}

/// The two warps that copy.
class WideRowsProducer {
 public:
  using Memory = WideRowsMemory;

  __device__ __forceinline__ WideRowsProducer(const HopperBackwardParams& params, Memory& memory)
      : params_(params), memory_(memory) {}

  /// Own rows and keys.
  __device__ __forceinline__ void copy_keys() {
    const auto find = [&](int ticket, WideRowsWork& work) {
      return find_wide_rows(params_, ticket, work);
    };
    announce_works(params_, memory_, find, [&](const WideRowsWork& work) {
      if (threadIdx.x % 32 == 0) copy_own(work);
      for_each_tile(work.walk, [&](std::int32_t tile) {
        copy_tile(memory_.keys[ring_.stage()], memory_.key_barriers[ring_.stage()], ring_.emptied(),
                  params_.k, work.rows.k + tile * kTile, work.walk.kv_head, [] {});
      });
    });
  }
  __device__ __forceinline__ void copy_values() {
    follow_works(memory_, [&](const WideRowsWork& work) {
      for_each_tile(work.walk, [&](std::int32_t tile) {
        // The one stage of values is filled as often as the two of keys in turns.
        const unsigned emptied = 1U - static_cast<unsigned>(ring_.stage());
        copy_tile(memory_.values, memory_.value_barriers, emptied, params_.v,
                  work.rows.v + tile * kTile, work.walk.kv_head, [] {});
      });
    });
  }

 private:
  __device__ __forceinline__ void copy_own(const WideRowsWork& work) {
    const Barrier& barrier = memory_.own_barriers.full;
#pragma unroll 1
    for (int i = 0; i < kRowTiles; ++i) {
      const std::int32_t first = (work.walk.own_tile + i) * kTile;
      const std::int32_t head = work.walk.first_head;
      copy_boxes(memory_.own[i].queries.boxes, params_.q, work.rows.q + first, head, barrier);
      copy_boxes(memory_.own[i].douts.boxes, params_.dout, work.rows.dout + first, head, barrier);
    }
  }
  template <class Copy>
  __device__ __forceinline__ void for_each_tile(const TileWalk<false>& walk, const Copy& copy) {
    backward::OtherTile other = walk.first();
    for (std::int32_t left = walk.num_steps(); left > 0; --left) {
      copy(other.tile);
      ring_.advance();
      other = walk.after(other);
    }
  }

  const HopperBackwardParams& params_;
  Memory& memory_;
  CountedPosition<Memory::kStages> ring_;  // of keys
};

/// A warpgroup that computes dq of its tile of rows.
template <class Half>
class WideRowsConsumer {
 public:
  using Memory = WideRowsMemory;
  using Sums = backward::FragmentSums<Half, WideShape::kHeadColumns>;

  __device__ __forceinline__ WideRowsConsumer(const HopperBackwardParams& params, Memory& memory)
      : scale_(params.scale),
        backward_(params.backward),
        call_(params.backward.call),
        memory_(memory),
        group_(uniform(static_cast<int>(threadIdx.x) / kGroupThreads - 1)) {}

  __device__ __forceinline__ void run() {
    compute_works(memory_, [&](const WideRowsWork& work) { run_work(work); });
  }

 private:
  // Of the products of S, whose operand A stays in registers: as many as there are.
  static constexpr int kHeldSteps = 3;
  static constexpr int kOwnBarrier = 1;  // of the first warpgroup, and of the second

  __device__ __forceinline__ int barrier() const { return kOwnBarrier + group_; }

  __device__ __forceinline__ void run_work(const WideRowsWork& work) {
    Sums sums;
    left_ = uniform(work.walk.num_steps());
    if (left_ != 0) {
      other_ = work.walk.first();
      if (work.seen[group_].begin != work.seen[group_].end) load_own(work.walk);
      hold_in_place(sums.sums);
      add_tiles(work, sums);
    }
    arrive_as_warp(memory_.own_barriers.empty);
    store(work.walk, sums);
  }

  __device__ __forceinline__ std::int32_t own_tile(const TileWalk<false>& walk) const {
    return walk.own_tile + group_;
  }

  __device__ __forceinline__ void load_own(const TileWalk<false>& walk) {
    const std::uint64_t live = backward_.live_rows[walk.first_head * backward_.num_row_tiles +
                                                   walk.row_tile_start + own_tile(walk)];
    zero_dead_rows_alone(memory_.own[group_].queries, live, barrier());
    zero_dead_rows_alone(memory_.own[group_].douts, live, barrier());
    hold_operand(memory_.own[group_].queries.boxes, held_);
    const backward::FragmentPlace place;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t token = std::int64_t{own_tile(walk)} * kTile + place.own(2 * half);
      stats_[half] = load_stats(backward_, walk, walk.first_head, token);
    }
  }

  __device__ __forceinline__ BufferBarriers& key_barriers() {
    return memory_.key_barriers[at_.stage()];
  }
  __device__ __forceinline__ unsigned values_filled() const {
    return static_cast<unsigned>(at_.stage());  // as in the producer
  }

  /// Whether there is a next tile of the block, and the own rows see it.
  __device__ __forceinline__ bool sees_next(const WideRowsWork& work) const {
    const TileRange& seen = work.seen[group_];
    return left_ > 0 && other_.tile >= seen.begin && other_.tile < seen.end;
  }
  /// Passes over the tiles that only the other warpgroup's rows see.
  __device__ __forceinline__ bool find_next(const WideRowsWork& work) {
    while (left_ > 0 && uniform(sees_next(work) ? 1 : 0) == 0) {
      key_barriers().full.wait(at_.filled());
      arrive_as_warp(key_barriers().empty);
      memory_.value_barriers.full.wait(values_filled());
      arrive_as_warp(memory_.value_barriers.empty);
      at_.advance();
      pass(work.walk);
    }
    return left_ > 0;
  }
  __device__ __forceinline__ void pass(const TileWalk<false>& walk) {
    --left_;
    other_ = walk.after(other_);
  }

  __device__ __forceinline__ static bool is_whole(const WideRowsWork& work, std::int32_t tile) {
    return (std::int64_t{tile} + 1) * kTile <= work.walk.sequence.kv_len;
  }
  /// Of the next tile, before its products.
  __device__ __forceinline__ void zero_dead_keys(const WideRowsWork& work) {
    if (is_whole(work, other_.tile)) return;
    const std::uint64_t live = live_keys(work.walk.sequence, other_.tile);
    key_barriers().full.wait(at_.filled());
    zero_dead_rows_alone(memory_.keys[at_.stage()], live, barrier());
    memory_.value_barriers.full.wait(values_filled());
    zero_dead_rows_alone(memory_.values, live, barrier());
  }

  /// S of the next tile.
  __device__ __forceinline__ void start_scores(WideScores& scores) {
    key_barriers().full.wait(at_.filled());
    hold_in_place(scores);
    hold_in_place(held_);
    begin_products();
    start_score<Half>(scores, held_, memory_.own[group_].queries.boxes,
                      memory_.keys[at_.stage()].boxes);
    commit_products();
  }
  /// Its dP.
  __device__ __forceinline__ void start_dscores(WideScores& dscores) {
    memory_.value_barriers.full.wait(values_filled());
    hold_in_place(dscores);
    begin_products();
    start_score<Half>(dscores, memory_.own[group_].douts.boxes, memory_.values.boxes);
    commit_products();
  }

  /// S and dP, as they come, to the operand of dq.
  __device__ __forceinline__ void find_gradients(const WideRowsWork& work, WideScores& scores,
                                                 WideScores& dscores, WideOperand& a) {
    finish_products<1>();
    hold_in_place(scores);
#pragma unroll
    for (int n = 0; n < kTile / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[n][i] = backward::plain_weight(scores[n][i], scale_, stats_[i / 2].lse);
      }
    }
    finish_before_wait(scores, &memory_.unused);
    finish_products<0>();
    hold_in_place(dscores);
    arrive_as_warp(memory_.value_barriers.empty);
#pragma unroll
    for (int n = 0; n < kTile / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        dscores[n][i] = scores[n][i] * (dscores[n][i] - stats_[i / 2].delta);
      }
    }
    const int moved = other_.tile * kTile;
    Band band = work.bands[group_];
    band.low -= moved;
    band.high -= moved;
    band.keys -= moved;
    if (!band.sees_all(kTile, kTile)) backward::apply_window<false>(band, scores, dscores);
    pack_operand<Half>(dscores, a);
  }

  __device__ __forceinline__ void add_tiles(const WideRowsWork& work, Sums& sums) {
    WideScores scores;
    while (find_next(work)) {
      zero_dead_keys(work);
      start_scores(scores);
      while (true) {
        // Both have the same registers: dP of the next tile starts when dQ is done with dS, while S
        // is still computed.
        WideScores dscores;
        WideOperand a;
        start_dscores(dscores);
        find_gradients(work, scores, dscores, a);
        start_sum<Half>(sums.sums, a, memory_.keys[at_.stage()].boxes);
        pass(work.walk);
        // Nothing is under way while tiles are passed over, which may wait for this one's stage,
        // and while registers are needed for dead keys.
        const bool goes_on = sees_next(work) && is_whole(work, other_.tile);
        if (uniform(goes_on ? 1 : 0) == 0) break;
        BufferBarriers& barriers = key_barriers();
        at_.advance();
        start_scores(scores);
        finish_products<1>();
        hold_in_place(sums.sums);
        arrive_as_warp(barriers.empty);
      }
      finish_products<0>();
      hold_in_place(sums.sums);
      arrive_as_warp(key_barriers().empty);
      at_.advance();
    }
  }

  __device__ __forceinline__ void store(const TileWalk<false>& walk, const Sums& sums) {
    const Operand& to = call_.dq;
    const std::int64_t begin = std::int64_t{own_tile(walk)} * kTile;
    store_rows<Half>(sums, scale_, to,
                     walk.sequence.dq + walk.first_head * to.head_stride + begin * to.token_stride,
                     walk.sequence.query_len - begin, static_cast<int>(call_.head_dim));
  }

  const float& scale_;  // in constant memory
  const BackwardParams& backward_;
  const AttentionParams& call_;
  Memory& memory_;
  const int group_;
  int left_ = 0;                 // tiles that the block meets, from the next one on
  backward::OtherTile other_{};  // the next one
  RowStats<float> stats_[2] = {};
  std::uint32_t held_[kHeldSteps][4];
  CountedPosition<Memory::kStages> at_;
};

template <class Half>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    backward_wide_rows(const __grid_constant__ HopperBackwardParams params) {
  using Memory = WideRowsMemory;
  extern __shared__ unsigned char shared[];
  auto& memory = *reinterpret_cast<Memory*>(aligned_memory(shared));
  if (threadIdx.x == 0) {
    init_barriers(memory.own_barriers, 1, kWideWarps + 1);
    for (BufferBarriers& barriers : memory.key_barriers) init_barriers(barriers, 1, kWideWarps);
    init_barriers(memory.value_barriers, 1, kWideWarps);
    publish_barriers();
  }
  __syncthreads();
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
  if (warp < kGroupThreads / 32) {
    give_registers<kWideProducerRegisters>();
    if (warp == 0) WideRowsProducer(params, memory).copy_keys();
    if (warp == 1) WideRowsProducer(params, memory).copy_values();
    return;
  }
  take_registers<kWideConsumerRegisters>();
  WideRowsConsumer<Half>(params, memory).run();
}

}  // namespace ladon::cuda::hopper
