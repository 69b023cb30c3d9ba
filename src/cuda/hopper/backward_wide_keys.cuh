// dk and dv on Hopper, bf16 with a scale and a window, heads and values up to 256 (padded with
// zeros).
//
//   S^T = K Q^T,  dP^T = V dO^T,  dV += P^T dO,  dK += dS^T Q
//
// A block owns 64 keys, which stay in shared memory with their values; tiles of 64 rows of q and of
// dout come through a ring of two stages each. dk and dv of 64 keys are 256 accumulators of a
// thread of one warpgroup, so one warpgroup sums dv and another dk. The first computes S and P and
// leaves P in f32 in shared memory, as its registers have it; the second computes dP and, with P,
// dS. Nothing goes back, and P has two buffers, so that each has its softmax while the other's
// products run. A warpgroup starts the products of a sum before the next scores: the tile of dout
// (or q) is free again that much earlier.
//
// The order of all sums is that of backward_mma.cuh, so the bits are the same. The careful kernels
// there compute tiles that meet NaN or infinity once more.
//
// Registers: 128 accumulators, 32 scores, 16 of operand A and 16 of held keys or values, of 232.
// Shared memory 226 KB: keys and values 64, stages 128, P 32. By count, a tile of rows is 2048
// cycles of tensor cores and 2176 of the shared memory's port (scores 896, sums 512, copies 512, P
// 256). It takes about 3400 by the time at S16384. A stage of q is in use from S to the end of dK,
// so that the ring limits a tile to about half of that time and of a copy's.
//
// H200, heads of 256, TFLOP/s counted as all five products (this kernel computes four): B1 H8
// S16384 causal 697, B4 H8 S4096 causal 628, B2 H16 S4096 full 689. With the kernel for dq 442 to
// 473, 370 to 392 and 433 to 440 in three runs, where cuDNN has 396, 358 and 369 and the generic
// kernels 108, 100 and 105.
//
// Tried and lost: more than 4 held steps (spilled); 24 registers for the warps that copy and 240
// for those that compute (divisions of the former spilled).
#pragma once

#include "cuda/hopper/backward_dq_products.cuh"
#include "cuda/hopper/backward_products.cuh"
#include "cuda/hopper/backward_scores.cuh"
#include "cuda/hopper/backward_store.cuh"
#include "cuda/hopper/backward_wide_tile.cuh"
#include "cuda/kernels/backward_fragments.cuh"

namespace ladon::cuda::hopper {

struct WideKeysWork {
  TileWalk<true> walk;
  FirstRows rows;
  Band band;  // of the own keys and the first tile of rows
  bool exists = false;
};

struct WideKeysMemory {
  static constexpr int kStepRows = kTile;
  static constexpr int kStages = 2;
  static constexpr int kOwnBytes = 2 * static_cast<int>(sizeof(WideTile));

  WideTile keys;
  WideTile values;
  WideTile queries[kStages];
  WideTile douts[kStages];
  float4 weights[kStages][kTile / 8][kGroupThreads];  // P, as the registers have it
  StageInfo<kTile> infos[kStages];                    // of the queries
  std::uint64_t live[kStages];                        // rows of the douts
  WideKeysWork works[WorkPosition::kWorks];
  BufferBarriers own_barriers;
  BufferBarriers query_barriers[kStages];
  BufferBarriers dout_barriers[kStages];
  BufferBarriers weight_barriers[kStages];
};

/// Tickets have the first keys first: under a causal mask those have the most to do. False where
/// the tile does not exist. A function of its own, because the producer has few registers.
__device__ __noinline__ inline bool find_wide_keys(const HopperBackwardParams& hopper, int ticket,
                                                   WideKeysWork& work) {
  const BackwardParams& params = hopper.backward;
  const OwnTiles own =
      find_own_tiles<1, false>(hopper, params.key_tile_starts, params.call.num_kv_heads, ticket);
  if (own.first >= own.number) return false;
  work.walk.set(params, own.sequence, own.first, own.owner);
  find_first_rows(params.call, work.walk.sequence, work.rows);
  work.band = Band(params.call.rules, work.walk.sequence, 0, work.walk.own_begin(), kFarthest);
  work.exists = true;
  return true;
}

/// The two warps that copy.
class WideKeysProducer {
 public:
  using Memory = WideKeysMemory;

  __device__ __forceinline__ WideKeysProducer(const HopperBackwardParams& params, Memory& memory)
      : params_(params), memory_(memory) {}

  /// Keys, values and rows of q.
  __device__ __forceinline__ void copy_queries() {
    const auto find = [&](int ticket, WideKeysWork& work) {
      return find_wide_keys(params_, ticket, work);
    };
    announce_works(params_, memory_, find, [&](const WideKeysWork& work) {
      const TileWalk<true>& walk = work.walk;
      if (threadIdx.x % 32 == 0) copy_own(work);
      for_each_tile(walk, [&](std::int32_t head, std::int32_t tile) {
        // Loaded before the wait for the stage: the copy is not to wait for them.
        const std::int32_t first = tile * kTile;
        const int lane = static_cast<int>(threadIdx.x) % 32;
        RowStats<float> stats[kTile / 32];
#pragma unroll
        for (int i = 0; i < kTile / 32; ++i) {
          stats[i] = load_stats(params_.backward, walk, head, std::int64_t{first} + lane + 32 * i);
        }
        const std::uint64_t live = live_rows(params_.backward, walk, head, tile);
        copy_tile(memory_.queries[ring_.stage()], memory_.query_barriers[ring_.stage()],
                  ring_.emptied(), params_.q, work.rows.q + first, head, [&] {
                    StageInfo<kTile>& info = memory_.infos[ring_.stage()];
#pragma unroll
                    for (int i = 0; i < kTile / 32; ++i) info.stats[lane + 32 * i] = stats[i];
                    info.live = live;
                  });
      });
    });
  }
  __device__ __forceinline__ void copy_douts() {
    follow_works(memory_, [&](const WideKeysWork& work) {
      const TileWalk<true>& walk = work.walk;
      for_each_tile(walk, [&](std::int32_t head, std::int32_t tile) {
        const std::uint64_t live = live_rows(params_.backward, walk, head, tile);
        copy_tile(memory_.douts[ring_.stage()], memory_.dout_barriers[ring_.stage()],
                  ring_.emptied(), params_.dout, work.rows.dout + tile * kTile, head,
                  [&] { memory_.live[ring_.stage()] = live; });
      });
    });
  }

 private:
  __device__ __forceinline__ void copy_own(const WideKeysWork& work) {
    const std::int32_t first = work.walk.own_tile * kTile;
    const std::int32_t head = work.walk.kv_head;
    const Barrier& barrier = memory_.own_barriers.full;
    copy_boxes(memory_.keys.boxes, params_.k, work.rows.k + first, head, barrier);
    copy_boxes(memory_.values.boxes, params_.v, work.rows.v + first, head, barrier);
  }
  template <class Copy>
  __device__ __forceinline__ void for_each_tile(const TileWalk<true>& walk, const Copy& copy) {
    for (std::int32_t head = 0; head < walk.num_heads; ++head) {
      for (std::int32_t tile = walk.others.begin; tile < walk.others.end; ++tile) {
        copy(walk.first_head + head, tile);
        ring_.advance();
      }
    }
  }

  const HopperBackwardParams& params_;
  Memory& memory_;
  CountedPosition<Memory::kStages> ring_;
};

/// A warpgroup that computes dv, or dk.
template <class Half, bool kOfValues>
class WideKeysConsumer {
 public:
  using Memory = WideKeysMemory;
  using Sums = backward::FragmentSums<Half, WideShape::kHeadColumns>;

  __device__ __forceinline__ WideKeysConsumer(const HopperBackwardParams& params, Memory& memory)
      : scale_(params.scale),
        call_(params.backward.call),
        memory_(memory),
        scores_(params.scale, memory) {}

  __device__ __forceinline__ void run() {
    compute_works(memory_, [&](const WideKeysWork& work) { run_work(work); });
  }

 private:
  static constexpr int kOwnBarrier = kOfValues ? 1 : 2;  // of the warpgroup
  // Of the products of a score, whose operand A stays in registers: as many as there are.
  static constexpr int kHeldSteps = 4;

  __device__ __forceinline__ static int thread() {
    return static_cast<int>(fresh(threadIdx.x)) % kGroupThreads;
  }

  __device__ __forceinline__ void run_work(const WideKeysWork& work) {
    const TileWalk<true>& walk = work.walk;
    Sums sums;
    left_ = uniform(walk.num_steps());
    if (left_ != 0) {
      tile_ = uniform(walk.others.begin);
      zero_dead_rows_alone(kOfValues ? memory_.keys : memory_.values,
                           live_keys(walk.sequence, walk.own_tile), kOwnBarrier);
      hold_operand((kOfValues ? memory_.keys : memory_.values).boxes, held_);
      hold_in_place(sums.sums);
      add_tiles(work, sums);
    }
    arrive_as_warp(memory_.own_barriers.empty);
    store(walk, sums);
  }

  __device__ __forceinline__ void wait_for_query() {
    memory_.query_barriers[at_.stage()].full.wait(at_.filled());
  }
  __device__ __forceinline__ void wait_for_dout() {
    memory_.dout_barriers[at_.stage()].full.wait(at_.filled());
  }
  /// After the wait.
  __device__ __forceinline__ void zero_dead_queries() {
    zero_dead_rows_alone(memory_.queries[at_.stage()], memory_.infos[at_.stage()].live,
                         kOwnBarrier);
  }
  __device__ __forceinline__ void zero_dead_douts() {
    zero_dead_rows_alone(memory_.douts[at_.stage()], memory_.live[at_.stage()], kOwnBarrier);
  }

  /// For the rows that the scores are computed from; whether all of them are live.
  __device__ __forceinline__ bool wait_for_scores() {
    kOfValues ? wait_for_query() : wait_for_dout();
    const std::uint64_t live =
        kOfValues ? memory_.infos[at_.stage()].live : memory_.live[at_.stage()];
    return uniform(live == ~std::uint64_t{0} ? 1 : 0) != 0;
  }
  /// S of the tile, or dP, after the wait.
  __device__ __forceinline__ void start_scores(WideScores& scores) {
    hold_in_place(scores);
    hold_in_place(held_);
    begin_products();
    if constexpr (kOfValues) {
      start_score<Half>(scores, held_, memory_.keys.boxes, memory_.queries[at_.stage()].boxes);
    } else {
      start_score<Half>(scores, held_, memory_.values.boxes, memory_.douts[at_.stage()].boxes);
    }
    commit_products();
  }

  /// Leaves P for the other warpgroup, and the operand of dv here.
  __device__ __forceinline__ void find_weights(const WideKeysWork& work, WideScores& scores,
                                               WideOperand& a) {
    const Step step{at_.stage(), tile_};
    BufferBarriers& barriers = memory_.weight_barriers[at_.stage()];
    scores_.weigh(step, scores);
    scores_.mask(work.band, step, scores, scores);
    barriers.empty.wait(at_.emptied());
    float4(*const to)[kGroupThreads] = memory_.weights[at_.stage()];
    const int thread = this->thread();
#pragma unroll
    for (int n = 0; n < kTile / 8; ++n) {
      to[n][thread] = make_float4(scores[n][0], scores[n][1], scores[n][2], scores[n][3]);
    }
    arrive_as_warp(barriers.full);
    arrive_as_warp(memory_.query_barriers[at_.stage()].empty);
    pack_operand<Half>(scores, a);
    wait_for_dout();
    zero_dead_douts();
  }
  /// The operand of dk.
  __device__ __forceinline__ void find_gradients(const WideKeysWork& work, WideScores& dscores,
                                                 WideOperand& a) {
    const Step step{at_.stage(), tile_};
    BufferBarriers& barriers = memory_.weight_barriers[at_.stage()];
    arrive_as_warp(memory_.dout_barriers[at_.stage()].empty);
    wait_for_query();
    zero_dead_queries();
    barriers.full.wait(at_.filled());
    const float4(*const from)[kGroupThreads] = memory_.weights[at_.stage()];
    const int thread = this->thread();
#pragma unroll
    for (int n = 0; n < kTile / 8; ++n) {
      const float4 weights = from[n][thread];
      scores_.differentiate(step, n, {weights.x, weights.y, weights.z, weights.w}, dscores[n]);
    }
    arrive_as_warp(barriers.empty);
    scores_.mask(work.band, step, dscores, dscores);
    pack_operand<Half>(dscores, a);
  }

  __device__ __forceinline__ void add_tiles(const WideKeysWork& work, Sums& sums) {
    WideScores scores;
    WideOperand a;
    while (left_ > 0) {
      // Nothing is under way while dead rows are set to 0: that takes registers.
      if (!wait_for_scores()) kOfValues ? zero_dead_queries() : zero_dead_douts();
      start_scores(scores);
      while (true) {
        finish_products<0>();
        hold_in_place(scores);
        if constexpr (kOfValues) {
          find_weights(work, scores, a);
          start_sum<Half>(sums.sums, a, memory_.douts[at_.stage()].boxes);
        } else {
          find_gradients(work, scores, a);
          start_sum<Half>(sums.sums, a, memory_.queries[at_.stage()].boxes);
        }
        BufferBarriers& barriers = rows_of_sum();
        at_.advance();
        if (++tile_ == work.walk.others.end) tile_ = work.walk.others.begin;  // of the next head
        const bool goes_on = --left_ > 0 && wait_for_scores();
        if (!goes_on) {
          finish_sum(barriers, sums);
          break;
        }
        start_scores(scores);
        finish_products<1>();
        hold_in_place(sums.sums);
        arrive_as_warp(barriers.empty);
      }
    }
  }
  __device__ __forceinline__ void finish_sum(BufferBarriers& barriers, Sums& sums) {
    finish_products<0>();
    hold_in_place(sums.sums);
    arrive_as_warp(barriers.empty);
  }
  /// The tile that products of the sum read.
  __device__ __forceinline__ BufferBarriers& rows_of_sum() {
    return kOfValues ? memory_.dout_barriers[at_.stage()] : memory_.query_barriers[at_.stage()];
  }

  __device__ __forceinline__ void store(const TileWalk<true>& walk, const Sums& sums) {
    const Operand& to = kOfValues ? call_.dv : call_.dk;
    const std::int64_t offset = kOfValues ? walk.sequence.dv : walk.sequence.dk;
    const std::int64_t dim = kOfValues ? call_.value_dim : call_.head_dim;
    const std::int64_t begin = walk.own_begin();
    store_rows<Half>(sums, kOfValues ? 1.0F : scale_, to,
                     offset + walk.kv_head * to.head_stride + begin * to.token_stride,
                     walk.sequence.kv_len - begin, static_cast<int>(dim));
  }

  const float& scale_;  // in constant memory
  const AttentionParams& call_;
  Memory& memory_;
  int left_ = 0;           // tiles, with the one under way
  std::int32_t tile_ = 0;  // of rows
  CountedPosition<Memory::kStages> at_;
  std::uint32_t held_[kHeldSteps][4];
  StepScores<Memory> scores_;
};

template <class Half>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    backward_wide_keys(const __grid_constant__ HopperBackwardParams params) {
  using Memory = WideKeysMemory;
  extern __shared__ unsigned char shared[];
  auto& memory = *reinterpret_cast<Memory*>(aligned_memory(shared));
  if (threadIdx.x == 0) {
    init_barriers(memory.own_barriers, 1, kWideWarps + 1);
    for (int i = 0; i < Memory::kStages; ++i) {
      init_barriers(memory.query_barriers[i], 1, kWideWarps);
      init_barriers(memory.dout_barriers[i], 1, kWideWarps);
      init_barriers(memory.weight_barriers[i], kWideWarps / 2, kWideWarps / 2);
    }
    publish_barriers();
  }
  __syncthreads();
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
  if (warp < kGroupThreads / 32) {
    give_registers<kWideProducerRegisters>();
    if (warp == 0) WideKeysProducer(params, memory).copy_queries();
    if (warp == 1) WideKeysProducer(params, memory).copy_douts();
    return;
  }
  take_registers<kWideConsumerRegisters>();
  if (warp < 2 * kGroupThreads / 32) {
    WideKeysConsumer<Half, true>(params, memory).run();
  } else {
    WideKeysConsumer<Half, false>(params, memory).run();
  }
}

}  // namespace ladon::cuda::hopper
