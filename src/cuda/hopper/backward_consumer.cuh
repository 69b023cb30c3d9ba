// A warpgroup of Hopper's backward kernel that computes: scores, weights and gradients of scores,
// and their sums.
#pragma once

#include "cuda/hopper/backward_dq_products.cuh"
#include "cuda/hopper/backward_store.cuh"
#include "cuda/hopper/backward_tile.cuh"
#include "cuda/kernels/backward_fragments.cuh"

namespace ladon::cuda::hopper {

using backward::Band;
using backward::FragmentPlace;
using backward::FragmentSums;

/// Waits for all of the `threads` threads that use the barrier; 0 is __syncthreads().
__device__ __forceinline__ void sync_threads(int barrier, int threads) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

/// Sets rows without their bit in `live` to 0; products may read the tile after the threads that
/// call it have met at a barrier.
template <class Pair>
__device__ inline void zero_dead_rows(Pair& pair, std::uint64_t live, int thread, int threads) {
  constexpr int kChunkBytes = 16;
  constexpr int kChunks = static_cast<int>(sizeof(Pair)) / kChunkBytes;
  const std::uint32_t address = shared_address(&pair);
  for (int chunk = thread; chunk < kChunks; chunk += threads) {
    const int row = chunk * kChunkBytes / kBoxRowBytes % kTile;
    if ((live >> row & 1) == 0) {
      store_16(address + static_cast<unsigned>(chunk * kChunkBytes), 0, 0, 0, 0);
    }
  }
  publish_writes();
}

template <class Half, int kColumns>
class BackwardConsumer {
 public:
  using Memory = BackwardMemory<kColumns>;
  using Pair = typename Memory::Pair;
  using Sums = FragmentSums<Half, kColumns>;

  __device__ __forceinline__ BackwardConsumer(const HopperBackwardParams& params, Memory& memory)
      : scale_(params.scale),
        call_(params.backward.call),
        memory_(memory),
        group_(uniform(static_cast<int>(threadIdx.x) / kGroupThreads - 1)),
        dq_products_(memory, group_) {}

  __device__ __forceinline__ void run() {
    while (true) {
      memory_.own_barriers.full.wait(works_.filled());
      const auto& work = memory_.works[works_.stage()];
      if (uniform(work.exists ? 1 : 0) == 0) return;
      run_work(work, work.walks[group_]);
      works_.advance();
    }
  }

 private:
  static constexpr int kOwnSteps = kColumns / 16;  // of a product over columns
  static constexpr int kTileSteps = kTile / 16;    // of one over a tile's rows
  static constexpr int kScoreGroups = kTile / 8;
  // Whether dv and dk of a tile are waited for when S and dP of the next have been started, so that
  // the tensor cores have work meanwhile. At 128 columns the registers do not suffice.
  static constexpr bool kScoresAhead = kColumns == 64;
  using Scores = float[kScoreGroups][4];
  using DqSums = typename DqProducts<Half, kColumns>::Sums;
  using Walk = TileWalk<true>;

  // Of warpgroups for themselves, then of all that compute.
  static constexpr int kOwnBarrier = 1;
  static constexpr int kStageBarrier = kOwnBarrier + kBlockTiles;
  static constexpr int kAllThreads = kBlockTiles * kGroupThreads;

  __device__ __forceinline__ void run_work(const BackwardWork& work, const Walk& walk) {
    Sums sums;
    Sums value_sums;
    seen_ = {uniform(walk.others.begin), uniform(walk.others.end)};
    met_ = {uniform(work.met.begin), uniform(work.met.end)};
    left_ = uniform((met_.end - met_.begin) * walk.num_heads);
    if (left_ != 0) {
      next_tile_ = met_.begin;
      if (thread() == 0) set_band(walk);
      load_own(walk);
      add_tiles(sums, value_sums);
    }
    release(memory_.own_barriers);
    store(walk, sums, value_sums);
  }

  /// Each tile further moves it by 64, which stays within 32 bits. In shared memory, because the
  /// products need the registers.
  __device__ __forceinline__ void set_band(const Walk& walk) {
    constexpr std::int64_t kFar = std::int64_t{1} << 30;
    memory_.bands[group_] = Band(call_.rules, walk.sequence, 0, walk.own_begin(), kFar);
  }

  /// Within the warpgroup; what is computed from it is not kept in registers.
  __device__ __forceinline__ int thread() const {
    return static_cast<int>(fresh(threadIdx.x)) % kGroupThreads;
  }

  /// Keys that do not exist become zeros, whether or not the own tile meets anything: dq is summed
  /// over both tiles of the block.
  __device__ __forceinline__ void load_own(const Walk& walk) {
    const std::uint64_t live = live_keys(walk.sequence, walk.own_tile);
    if (live != ~std::uint64_t{0}) {
      zero_dead_rows(memory_.own[group_], live, thread(), kGroupThreads);
    }
    sync_threads(kOwnBarrier + group_, kGroupThreads);
  }

  /// Waits for the ring's next tile.
  __device__ __forceinline__ void wait_for_tile() {
    memory_.barriers[ring_.stage()].full.wait(ring_.filled());
    const std::uint64_t live = memory_.infos[ring_.stage()].live;
    if (uniform(live != ~std::uint64_t{0} ? 1 : 0) != 0) {
      sync_threads(kStageBarrier, kAllThreads);
      zero_dead_rows(memory_.stages[ring_.stage()], live,
                     static_cast<int>(fresh(threadIdx.x)) - kGroupThreads, kAllThreads);
      sync_threads(kStageBarrier, kAllThreads);
    }
  }
  __device__ __forceinline__ void release(BufferBarriers& barriers) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barriers.empty.arrive();
  }

  /// A tile in shared memory.
  struct Step {
    int stage;
    std::int32_t tile;
  };

  /// Waits for the next tile that the block meets. False where there is none.
  __device__ __forceinline__ bool find_next(Step& step) {
    if (left_-- == 0) return false;
    step = {ring_.stage(), next_tile_};
    if (++next_tile_ == met_.end) next_tile_ = met_.begin;  // of the next head
    wait_for_tile();
    ring_.advance();
    return true;
  }

  /// S and dP: own rows times the rows of the tile.
  __device__ __forceinline__ void start_scores(const Step& step, Scores& scores, Scores& dscores) {
    const Pair& own = memory_.own[group_];
    const Pair& tile = memory_.stages[step.stage];
    hold_in_place(scores);
    hold_in_place(dscores);
    begin_products();
    start_score(scores, own.first, tile.first);
    commit_products();
    start_score(dscores, own.second, tile.second);
    commit_products();
  }
  using Boxes = unsigned char[Pair::kBoxes][Pair::kBoxBytes];
  __device__ __forceinline__ void start_score(Scores& scores, const Boxes& own,
                                              const Boxes& other) {
    const TileOperand a(shared_address(own), Pair::kBoxBytes);
    const TileOperand b(shared_address(other), Pair::kBoxBytes);
    start_product<Half, false>(scores, a.descriptor(0), b.descriptor(0));
#pragma unroll
    for (int step = 1; step < kOwnSteps; ++step) {
      const int offset = step / 4 * Pair::kBoxBytes + step % 4 * 32;
      start_product<Half, true>(scores, a.descriptor(offset), b.descriptor(offset));
    }
  }

  __device__ __forceinline__ void add_tiles(Sums& sums, Sums& value_sums) {
    Step step;
    int before = -1;  // the stage of the tile before
    ring_.make_uniform();
    hold_in_place(sums.sums);
    hold_in_place(value_sums.sums);
    while (find_next(step)) {
      if (step.tile >= seen_.begin && step.tile < seen_.end) {
        add_tile(step, before, sums, value_sums);
      } else {
        if constexpr (kScoresAhead) finish_tile<0>(before, sums, value_sums);
        dq_products_.store_no_dscores();
        if (before >= 0) add_dq();
      }
      if constexpr (!kScoresAhead) release(memory_.barriers[step.stage]);
      before = step.stage;
    }
    if constexpr (kScoresAhead) finish_tile<0>(before, sums, value_sums);
    add_dq();
  }

  /// Waits for dv and dk of the tile before.
  template <int kPending>
  __device__ __forceinline__ void finish_tile(int stage, Sums& sums, Sums& value_sums) {
    finish_products<kPending>();
    hold_in_place(value_sums.sums);
    hold_in_place(sums.sums);
    if (stage >= 0) release(memory_.barriers[stage]);
  }

  /// Leaves the products of dv and dk under way where scores come ahead of them.
  __device__ __forceinline__ void add_tile(const Step& step, int before, Sums& sums,
                                           Sums& value_sums) {
    const Pair& tile = memory_.stages[step.stage];
    const bool has_dq = before >= 0;
    Scores scores;
    Scores dscores;
    DqSums dq;
    start_scores(step, scores, dscores);
    if constexpr (kScoresAhead) finish_tile<2>(before, sums, value_sums);
    finish_products<1>();
    hold_in_place(scores);
    weigh(step, scores);
    finish_products<0>();
    hold_in_place(dscores);
    differentiate(step, scores, dscores);
    mask(step, scores, dscores);
    pack_operand(scores, weights_);
    pack_operand(dscores, gradients_);
    dq_products_.store_dscores(gradients_);
    if constexpr (kScoresAhead) {
      dq_products_.start(has_dq, dq);
      start_sum(value_sums, weights_, tile.second);
      start_sum(sums, gradients_, tile.first);
      finish_products<2>();
      if (has_dq) dq_products_.finish(dq);
    } else {
      start_sum(value_sums, weights_, tile.second);
      dq_products_.start(has_dq, dq);
      start_sum(sums, gradients_, tile.first);
      finish_products<1>();
      hold_in_place(value_sums.sums);
      if (has_dq) dq_products_.finish(dq);
      finish_products<0>();
      hold_in_place(sums.sums);
    }
  }

  /// dq of the last tile.
  __device__ __forceinline__ void add_dq() {
    DqSums dq;
    dq_products_.start(true, dq);
    finish_products<0>();
    dq_products_.finish(dq);
  }

  /// S to P.
  __device__ __forceinline__ void weigh(const Step& step, Scores& scores) {
#pragma unroll
    for (int n = 0; n < kScoreGroups; ++n) {
      load_stats(step, n);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[n][i] = backward::plain_weight(scores[n][i], scale_, stats_[i % 2].lse);
      }
    }
  }
  /// dP to dS.
  __device__ __forceinline__ void differentiate(const Step& step, const Scores& weights,
                                                Scores& dscores) {
#pragma unroll
    for (int n = 0; n < kScoreGroups; ++n) {
      load_stats(step, n);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        dscores[n][i] = weights[n][i] * (dscores[n][i] - stats_[i % 2].delta);
      }
    }
  }
  /// Of the two rows whose scores with the own keys are in group n.
  __device__ __forceinline__ void load_stats(const Step& step, int n) {
    const FragmentPlace place;
    const auto pair =
        *reinterpret_cast<const float4*>(&memory_.infos[step.stage].stats[place.other(n, 0)]);
    stats_[0] = {pair.x, pair.y};
    stats_[1] = {pair.z, pair.w};
  }

  __device__ __forceinline__ void mask(const Step& step, Scores& weights, Scores& gradients) {
    const int moved = step.tile * kTile;
    Band band = memory_.bands[group_];
    band.low += moved;
    band.high += moved;
    if (!band.sees_all(kTile, kTile)) backward::apply_window<true>(band, weights, gradients);
  }

  /// Rounds P or dS to the operand A of products over the tile's rows.
  __device__ __forceinline__ static void pack_operand(const Scores& values,
                                                      std::uint32_t (&a)[kTileSteps][4]) {
#pragma unroll
    for (int step = 0; step < kTileSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&from)[4] = values[2 * step + i / 2];
        a[step][i] = pack<Half>(from[i % 2 * 2], from[i % 2 * 2 + 1]);
      }
    }
  }

  /// dk += dS^T q, or dv += P^T dout.
  __device__ __forceinline__ void start_sum(Sums& sums, std::uint32_t (&a)[kTileSteps][4],
                                            const Boxes& rows) {
    const TileOperand b(shared_address(rows), Pair::kBoxBytes);
    hold_in_place(sums.sums);
    hold_in_place(a);
    begin_products();
#pragma unroll
    for (int step = 0; step < kTileSteps; ++step) {
      start_product<Half, true>(sums.sums, a[step], b.descriptor(step * 16 * kBoxRowBytes));
    }
    commit_products();
  }

  __device__ __forceinline__ void store(const Walk& walk, const Sums& sums,
                                        const Sums& value_sums) {
    const Sequence& sequence = walk.sequence;
    const std::int64_t begin = walk.own_begin();
    const auto start = [&](const Operand& operand, std::int64_t offset, std::int64_t head) {
      return offset + head * operand.head_stride + begin * operand.token_stride;
    };
    const std::int64_t count = sequence.kv_len - begin;
    store_rows<Half>(sums, scale_, call_.dk, start(call_.dk, sequence.dk, walk.kv_head), count,
                     static_cast<int>(call_.head_dim));
    store_rows<Half>(value_sums, 1.0F, call_.dv, start(call_.dv, sequence.dv, walk.kv_head), count,
                     static_cast<int>(call_.value_dim));
  }

  const float& scale_;  // in constant memory
  const AttentionParams& call_;
  Memory& memory_;
  const int group_;
  TileRange seen_;  // tiles that the own one meets
  TileRange met_;   // those that any own tile of the block meets
  int left_ = 0;    // of those, in all heads
  std::int32_t next_tile_ = 0;
  RowStats<float> stats_[2];
  std::uint32_t weights_[kTileSteps][4];
  std::uint32_t gradients_[kTileSteps][4];
  RingPosition<Memory::kStages> ring_;
  WorkPosition works_;
  DqProducts<Half, kColumns> dq_products_;
};

}  // namespace ladon::cuda::hopper
