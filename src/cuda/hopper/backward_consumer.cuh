// A warpgroup of Hopper's backward kernel that computes: scores, weights and gradients of scores,
// and their sums.
#pragma once

#include "cuda/hopper/backward_dq_products.cuh"
#include "cuda/hopper/backward_products.cuh"
#include "cuda/hopper/backward_rows.cuh"
#include "cuda/hopper/backward_scores.cuh"
#include "cuda/hopper/backward_store.cuh"
#include "cuda/hopper/backward_tile.cuh"
#include "cuda/kernels/backward_fragments.cuh"

namespace ladon::cuda::hopper {

using backward::FragmentSums;

template <class Half, class Shape>
class BackwardConsumer {
 public:
  using Memory = BackwardMemory<Shape>;
  using Sums = FragmentSums<Half, Shape::kHeadColumns>;
  using ValueSums = FragmentSums<Half, Shape::kValueColumns>;

  __device__ __forceinline__ BackwardConsumer(const HopperBackwardParams& params, Memory& memory)
      : scale_(params.scale),
        backward_(params.backward),
        call_(params.backward.call),
        memory_(memory),
        group_(uniform(static_cast<int>(threadIdx.x) / kGroupThreads - 1)),
        scores_(params.scale, memory),
        dq_products_(memory, group_) {}

  __device__ __forceinline__ void run() {
    while (true) {
      memory_.own_barriers.full.wait(works_.filled());
      if (uniform(work().exists ? 1 : 0) == 0) return;
      run_work(work(), work().walks[group_]);
      works_.advance();
    }
  }

 private:
  static constexpr int kStepSteps = Shape::kStepRows / 16;  // of a product over a step's rows
  // Whether dv and dk of a tile are waited for when S and dP of the next have been started, so that
  // the tensor cores have work meanwhile. At 128 columns the registers do not suffice.
  static constexpr bool kScoresAhead = Shape::kHeadColumns == 64;
  using Scores = typename StepScores<Memory>::Scores;
  template <int kPart>
  using DqSums = typename DqProducts<Half, Shape>::template Sums<kPart>;
  using Walk = TileWalk<true>;

  // Of warpgroups for themselves, then of all that compute.
  static constexpr int kOwnBarrier = 1;
  static constexpr int kStageBarrier = kOwnBarrier + kBlockTiles;
  static constexpr int kAllThreads = kBlockTiles * kGroupThreads;

  __device__ __forceinline__ void run_work(const BackwardWork& work, const Walk& walk) {
    Sums sums;
    ValueSums value_sums;
    left_ = uniform((work.met.end - work.met.begin) * walk.num_heads);
    if (left_ != 0) {
      next_tile_ = uniform(work.met.begin);
      if (thread() == 0) set_band(walk);
      load_own(walk);
      add_tiles(sums, value_sums);
    } else {
      record_keys(walk, false);
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
      sync_threads(kOwnBarrier + group_, kGroupThreads);
    }
    const bool found = finds_non_finite<Half>(memory_.own[group_], thread(), kGroupThreads);
    record_keys(walk, sync_threads_or(kOwnBarrier + group_, kGroupThreads, found));
  }
  /// For the careful kernels: whether own keys have NaN or infinity. Those that no row meets need
  /// not say so.
  __device__ __forceinline__ void record_keys(const Walk& walk, bool not_finite) {
    if (thread() != 0 || live_keys(walk.sequence, walk.own_tile) == 0) return;
    backward_.keys_not_finite[walk.kv_head * backward_.num_key_tiles + walk.key_tile_start +
                              walk.own_tile] = not_finite ? 1 : 0;
    if (not_finite) atomicOr(backward_.any_not_finite, 1U);
  }

  /// Waits for the ring's next rows.
  __device__ __forceinline__ void wait_for_step() {
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

  /// The ring's rows, where the next ones are not asked for before.
  __device__ __forceinline__ void release_step() {
    release(memory_.barriers[ring_.stage()]);
    ring_.advance();
  }

  /// In shared memory, because the products need the registers.
  __device__ __forceinline__ const BackwardWork& work() const {
    return memory_.works[works_.stage()];
  }
  /// Whether the own tile meets it; another of the block does.
  __device__ __forceinline__ bool is_seen(std::int32_t tile) const {
    const TileRange& seen = work().walks[group_].others;
    return uniform(tile >= seen.begin && tile < seen.end ? 1 : 0) != 0;
  }

  /// Finds the next tile that the block meets, and waits for its first step. False where there is
  /// none.
  __device__ __forceinline__ bool find_next(Step& step) {
    if (left_-- == 0) return false;
    step = {ring_.stage(), next_tile_};
    if (++next_tile_ == work().met.end) next_tile_ = work().met.begin;  // of the next head
    wait_for_step();
    if constexpr (kScoresAhead) ring_.advance();
    return true;
  }
  /// The next step of the same tile.
  __device__ __forceinline__ void find_part(Step& step, int part) {
    step = {ring_.stage(), step.tile, part};
    wait_for_step();
  }

  /// S and dP: own rows times the rows of the tile.
  __device__ __forceinline__ void start_scores(const Step& step, Scores& scores, Scores& dscores) {
    const auto& own = memory_.own[group_];
    const auto& tile = memory_.stages[step.stage];
    hold_in_place(scores);
    hold_in_place(dscores);
    begin_products();
    start_score<Half>(scores, own.first, tile.first);
    commit_products();
    start_score<Half>(dscores, own.second, tile.second);
    commit_products();
  }

  __device__ __forceinline__ void add_tiles(Sums& sums, ValueSums& value_sums) {
    if constexpr (Shape::kSteps > 1) return add_tiles_in_steps(sums, value_sums);
    Step step;
    int before = -1;  // the stage of the tile before, where that matters
    ring_.make_uniform();
    hold_in_place(sums.sums);
    hold_in_place(value_sums.sums);
    while (find_next(step)) {
      if (is_seen(step.tile)) {
        add_tile(step, before, sums, value_sums);
      } else {
        if constexpr (kScoresAhead) finish_tile<0>(before, sums, value_sums);
        dq_products_.store_no_dscores();
        if (before >= 0) add_dq();
      }
      if constexpr (!kScoresAhead) release_step();
      before = kScoresAhead ? step.stage : 0;
    }
    if constexpr (kScoresAhead) finish_tile<0>(before, sums, value_sums);
    add_dq();
  }

  /// Where registers hold the scores of a step of a tile at once, with a part of dq.
  __device__ __forceinline__ void add_tiles_in_steps(Sums& sums, ValueSums& value_sums) {
    Step step;
    bool has_dq = false;
    ring_.make_uniform();
    hold_in_place(sums.sums);
    hold_in_place(value_sums.sums);
    while (find_next(step)) {
      if (is_seen(step.tile)) {
        add_step<0>(step, has_dq, sums, value_sums);
        find_part(step, 1);
        add_step<1>(step, has_dq, sums, value_sums);
      } else {
        dq_products_.store_no_dscores();
        release_step();
        find_part(step, 1);
        release_step();
        if (has_dq) add_dq();
      }
      has_dq = true;
    }
    add_dq();
  }
  template <int kPart>
  __device__ __forceinline__ void add_step(const Step& step, bool has_dq, Sums& sums,
                                           ValueSums& value_sums) {
    const auto& tile = memory_.stages[step.stage];
    Scores scores;
    Scores dscores;
    DqSums<kPart> dq;
    start_scores(step, scores, dscores);
    finish_products<1>();
    hold_in_place(scores);
    scores_.weigh(step, scores);
    finish_products<0>();
    hold_in_place(dscores);
    find_gradients(step, scores, dscores);
    start_sum<Half>(value_sums.sums, weights_, tile.second);
    if constexpr (kPart == 0) {
      finish_products<0>();  // P gives its registers back before dq takes some
      hold_in_place(value_sums.sums);
    }
    dq_products_.template start<kPart>(has_dq, dq);
    start_sum<Half>(sums.sums, gradients_, tile.first);
    finish_products<1>();
    if constexpr (kPart > 0) hold_in_place(value_sums.sums);
    if (has_dq) dq_products_.template finish<kPart>(dq);
    finish_products<0>();
    hold_in_place(sums.sums);
    release_step();
  }

  /// Waits for dv and dk of the tile before.
  template <int kPending>
  __device__ __forceinline__ void finish_tile(int stage, Sums& sums, ValueSums& value_sums) {
    finish_products<kPending>();
    hold_in_place(value_sums.sums);
    hold_in_place(sums.sums);
    if (stage >= 0) release(memory_.barriers[stage]);
  }

  /// Leaves the products of dv and dk under way where scores come ahead of them.
  __device__ __forceinline__ void add_tile(const Step& step, int before, Sums& sums,
                                           ValueSums& value_sums) {
    const auto& tile = memory_.stages[step.stage];
    const bool has_dq = before >= 0;
    Scores scores;
    Scores dscores;
    DqSums<0> dq;
    start_scores(step, scores, dscores);
    if constexpr (kScoresAhead) finish_tile<2>(before, sums, value_sums);
    finish_products<1>();
    hold_in_place(scores);
    scores_.weigh(step, scores);
    finish_products<0>();
    hold_in_place(dscores);
    find_gradients(step, scores, dscores);
    if constexpr (kScoresAhead) {
      dq_products_.template start<0>(has_dq, dq);
      start_sum<Half>(value_sums.sums, weights_, tile.second);
      start_sum<Half>(sums.sums, gradients_, tile.first);
      finish_products<2>();
      if (has_dq) dq_products_.template finish<0>(dq);
    } else {
      start_sum<Half>(value_sums.sums, weights_, tile.second);
      dq_products_.template start<0>(has_dq, dq);
      start_sum<Half>(sums.sums, gradients_, tile.first);
      finish_products<1>();
      hold_in_place(value_sums.sums);
      if (has_dq) dq_products_.template finish<0>(dq);
      finish_products<0>();
      hold_in_place(sums.sums);
    }
  }

  /// All of dq of the last tile.
  __device__ __forceinline__ void add_dq() {
    add_dq_part<0>();
    if constexpr (Shape::kSteps > 1) add_dq_part<1>();
  }
  template <int kPart>
  __device__ __forceinline__ void add_dq_part() {
    DqSums<kPart> dq;
    dq_products_.template start<kPart>(true, dq);
    finish_products<0>();
    dq_products_.template finish<kPart>(dq);
  }

  /// P and dP to the operands of dv and dk, and dS to shared memory.
  __device__ __forceinline__ void find_gradients(const Step& step, Scores& weights,
                                                 Scores& dscores) {
    scores_.differentiate(step, weights, dscores);
    scores_.mask(memory_.bands[group_], step, weights, dscores);
    pack_operand<Half>(weights, weights_);
    pack_operand<Half>(dscores, gradients_);
    dq_products_.store_dscores(gradients_, step.part);
  }

  __device__ __forceinline__ void store(const Walk& walk, const Sums& sums,
                                        const ValueSums& value_sums) {
    const Sequence& sequence = walk.sequence;
    store(walk, sums, scale_, call_.dk, sequence.dk, call_.head_dim);
    store(walk, value_sums, 1.0F, call_.dv, sequence.dv, call_.value_dim);
  }
  template <class AnySums>
  __device__ __forceinline__ void store(const Walk& walk, const AnySums& sums, float factor,
                                        const Operand& operand, std::int64_t offset,
                                        std::int64_t dim) {
    // What this computes is not kept while the sums before are stored.
    const std::int64_t begin =
        static_cast<std::int64_t>(fresh(static_cast<std::uint32_t>(walk.own_tile))) * kTile;
    store_rows<Half>(sums, factor, operand,
                     offset + walk.kv_head * operand.head_stride + begin * operand.token_stride,
                     walk.sequence.kv_len - begin, static_cast<int>(dim));
  }

  const float& scale_;  // in constant memory
  const BackwardParams& backward_;
  const AttentionParams& call_;
  Memory& memory_;
  const int group_;
  int left_ = 0;  // tiles that any own tile of the block meets, in all heads
  std::int32_t next_tile_ = 0;
  std::uint32_t weights_[kStepSteps][4];
  std::uint32_t gradients_[kStepSteps][4];
  RingPosition<Memory::kStages> ring_;
  WorkPosition works_;
  StepScores<Memory> scores_;
  DqProducts<Half, Shape> dq_products_;
};

}  // namespace ladon::cuda::hopper
