// Attention forward on Hopper's tensor cores, for q, k and v of one 16-bit dtype, heads up to 128,
// with a scale and a window as the only rules (sinks and lse included).
//
// A block owns tiles of 128 query rows: tokens of one query head, or of several that share a KV
// head. One warp copies (Q once, then K and V in blocks of 64 keys, through rings of kStages
// buffers); two warpgroups of 64 rows compute:
//   S(n) = Q K(n)^T, 64 x 64 in 32 registers a thread, Q in registers
//   P(n) = exp(S(n) - maximum) in 16 registers; O += P(n) V(n), 64 x 128 in 64 registers
// S(n + 1) is multiplied before P(n) V(n), so that its softmax runs while the latter is under way.
//
// Every step is the arithmetic of forward_mma.cuh, in the same order: the same blocks of keys,
// segments, sums and folds (ForwardScores and ForwardSums are the same code), so a row has the same
// bits from both kernels. Tiles whose sums come out infinite or NaN are marked, and computed again
// by the careful kernel there.
//
// At head_dim 128 a block of keys is 1024 cycles of tensor cores a tile (2 x 128 x 64 x 128
// products), and 512 (Q K^T, P V) + 256 (copies) cycles of the shared memory's port; 512 cycles of
// exponentials.
#pragma once

#include <cstdint>

#include "cuda/hopper/barrier.cuh"
#include "cuda/hopper/bulk_copy.cuh"
#include "cuda/hopper/forward_params.h"
#include "cuda/hopper/wgmma.cuh"
#include "cuda/kernels/forward_launch.h"
#include "cuda/kernels/forward_scores.cuh"
#include "cuda/kernels/forward_sums.cuh"

namespace ladon::cuda::hopper {

inline constexpr int kGroupThreads = 128;  // of a warpgroup
inline constexpr int kGroupRows = 64;
inline constexpr int kConsumers = kTileRows / kGroupRows;
inline constexpr int kForwardThreads = (1 + kConsumers) * kGroupThreads;

/// What a tile is, for the warpgroups that compute it.
struct ForwardTile {
  int sequence = -1;  // negative: there is no more work
  int first_token = 0;
  RowHeads heads;
};

template <int kColumns>
struct ForwardMemory {
  static constexpr int kBoxes = kColumns / kBoxColumns;
  static constexpr int kKeyStages = kColumns == 128 ? 2 : 4;
  static constexpr int kValueStages = 2 * kKeyStages;
  // Of one box.
  static constexpr int kQueryBytes = kTileRows * kBoxRowBytes;
  static constexpr int kKeyBytes = 2 * kBlockKeys * kBoxRowBytes;
  static constexpr int kValueBytes = kBlockKeys * kBoxRowBytes;

  alignas(1024) unsigned char queries[kBoxes][kQueryBytes];
  alignas(1024) unsigned char keys[kKeyStages][kBoxes][kKeyBytes];  // of two blocks
  alignas(1024) unsigned char values[kValueStages][kBoxes][kValueBytes];
  float4 earlier[kConsumers * 4][kColumns / 8][32];  // sums of earlier segments, by warp
  BufferBarriers query_barriers;
  BufferBarriers key_barriers[kKeyStages];
  BufferBarriers value_barriers[kValueStages];
  ForwardTile tiles[2];  // in turns: one is computed while the next is announced
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

/// Tell the compiler that all threads of the warp have the same value: it must not take the code
/// that products start in for divergent.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffffU, value, 0); }
__device__ __forceinline__ BlockRange uniform(const BlockRange& blocks) {
  return {uniform(blocks.begin), uniform(blocks.end)};
}
__device__ __forceinline__ ForwardTile uniform(const ForwardTile& tile) {
  return {uniform(tile.sequence),
          uniform(tile.first_token),
          {uniform(tile.heads.first), uniform(tile.heads.heads)}};
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

/// Keys come in pairs of blocks: the first pair that holds some of them.
__device__ __forceinline__ int first_pair(const BlockRange& blocks) { return blocks.begin / 2 * 2; }

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

/// A warpgroup that computes 64 rows of each tile.
template <class Half, int kColumns>
class ForwardConsumer {
 public:
  using Memory = ForwardMemory<kColumns>;
  using Scores = ForwardScores<Half, false>;
  using Sums = ForwardSums<Half, kColumns / 8>;

  __device__ __forceinline__ ForwardConsumer(const HopperForwardParams& params, Memory& memory)
      : params_(params),
        call_(params.forward.call),
        memory_(memory),
        lane_(static_cast<int>(threadIdx.x) % 32),
        first_row_((static_cast<int>(threadIdx.x) / kGroupThreads - 1) * kGroupRows) {}

  __device__ __forceinline__ void run() {
    while (true) {
      memory_.query_barriers.full.wait(queries_.filled());
      const ForwardTile tile = uniform(memory_.tiles[queries_.filled()]);
      begin_products();
      if (tile.sequence < 0) return;
      run_tile(tile, call_.sequences[tile.sequence]);
    }
  }

 private:
  static constexpr int kQuerySteps = kColumns / 16;
  static constexpr int kWeightSteps = kBlockKeys / 16;

  /// Among those that compute; each has 16 rows.
  __device__ __forceinline__ int warp() const {
    return static_cast<int>((fresh(threadIdx.x) - kGroupThreads) / 32);
  }

  /// The thread's two rows are this one and 8 below.
  __device__ __forceinline__ int row_of_thread() const {
    return warp() * 16 + static_cast<int>(fresh(threadIdx.x)) % 32 / 4;
  }

  /// One arrival a warp, after all its lanes are done with the buffer.
  __device__ __forceinline__ void release(BufferBarriers& barriers) {
    __syncwarp();
    if (lane_ == 0) barriers.empty.arrive();
  }
  __device__ __forceinline__ void release_keys() {
    release(memory_.key_barriers[keys_.stage()]);
    keys_.advance();
  }
  __device__ __forceinline__ void release_values() {
    release(memory_.value_barriers[values_.stage()]);
    values_.advance();
  }

  __device__ __forceinline__ void run_tile(const ForwardTile& tile, const Sequence& sequence) {
    const BlockRange copied =
        uniform(blocks_of(call_, sequence, tokens_of_rows(sequence, tile, 0, kTileRows - 1)));
    const TokenRange tokens =
        tokens_of_rows(sequence, tile, first_row_, first_row_ + kGroupRows - 1);
    const BlockRange blocks = uniform(blocks_of(call_, sequence, tokens));
    const BlockRange whole =
        uniform(whole_blocks(call_.rules, sequence, tokens.first, tokens.last));
    const int first_row = tile.first_token * tile.heads.heads + row_of_thread();
    const int rows = static_cast<int>(sequence.query_len) * tile.heads.heads;
    NoStagedScores none;
    Scores scores(params_.forward, sequence, tile.heads, first_row, rows, none);
    Sums sums(static_cast<int>(call_.value_dim));
    RowState<float> total[2];

    keys_.make_uniform();
    values_.make_uniform();
    sums.clear();
    if (blocks.begin == blocks.end) {
      skip(first_pair(copied), copied.end);
      release(memory_.query_barriers);
    } else {
      skip(first_pair(copied), first_pair(blocks));
      run_blocks(scores, sums, blocks, whole, total);
      skip((blocks.end + 1) / 2 * 2, copied.end);
    }
    store(sums, total);
    queries_.advance();
  }

  /// Pairs of blocks that only the other warpgroup's rows see.
  __device__ __forceinline__ void skip(int pair, int end) {
    for (; pair < end; pair += 2) {
      memory_.key_barriers[keys_.stage()].full.wait(keys_.filled());
      release_keys();
      skip_values();
      skip_values();
    }
  }
  __device__ __forceinline__ void skip_values() {
    memory_.value_barriers[values_.stage()].full.wait(values_.filled());
    release_values();
  }

  /// Where the rows are among their blocks.
  struct Steps {
    BlockRange whole;  // blocks that need no mask
    RowState<float> segment[2];
    RowState<float> finished[2];  // the segment before, where the last block starts one
    float2 rescale = make_float2(1, 1);
    bool starts_segment = false;
    bool has_earlier = false;  // sums of earlier segments
  };

  __device__ __forceinline__ void run_blocks(Scores& rules, Sums& sums, const BlockRange& blocks,
                                             const BlockRange& whole, RowState<float> (&total)[2]) {
    Steps steps;
    steps.whole = whole;
    float scores[2][kKeyGroups][4];
    const int first = first_pair(blocks);
    int pair = first;
    start_scores(scores);
    finish_products<0>();
    hold_in_place(scores);
    release_keys();
    for (; pair + 2 < blocks.end; pair += 2) {
      add_block(rules, scores[0], pair, pair == first, sums, steps, total);
      weigh(rules, scores[1], pair + 1, steps);
      settle(sums, steps, false, total);
      round_weights(scores[1]);
      start_scores(scores);
      start_sums(sums);
      finish_products<1>();
      hold_in_place(scores);
      release_keys();
    }
    release(memory_.query_barriers);
    add_block(rules, scores[0], pair, pair == first, sums, steps, total);
    if (pair + 1 < blocks.end) {
      add_block(rules, scores[1], pair + 1, false, sums, steps, total);
    }
    finish_products<0>();
    hold_in_place(sums.accumulators());
    release_values();
    if (blocks.end % 2 == 1) skip_values();
    fold(sums, steps.segment, total, steps.has_earlier, true);
  }

  __device__ __forceinline__ void add_block(Scores& rules, float (&scores)[kKeyGroups][4],
                                            int block, bool is_first, Sums& sums, Steps& steps,
                                            RowState<float> (&total)[2]) {
    weigh(rules, scores, block, steps);
    settle(sums, steps, is_first, total);
    round_weights(scores);
    start_sums(sums);
  }

  /// Scores of a block become weights.
  __device__ __forceinline__ void weigh(Scores& rules, float (&scores)[kKeyGroups][4], int block,
                                        Steps& steps) {
    if (block < steps.whole.begin || block >= steps.whole.end) {
      rules.apply_rules(scores, block, nullptr);
    }
    steps.starts_segment = block % kSegmentBlocks == 0;
    if (steps.starts_segment) {
      steps.finished[0] = steps.segment[0];
      steps.finished[1] = steps.segment[1];
      steps.segment[0] = {};
      steps.segment[1] = {};
    }
    steps.rescale = rules.template weigh<false>(scores, steps.segment);
    keep_before_wait(steps.segment[0].sum, steps.segment[1].sum);
  }

  /// The assembler would move the wait for products up to before the softmax that is to run beside
  /// them. It does not move it past a store, and this one, which never happens, needs the sums.
  __device__ __forceinline__ void keep_before_wait(float first, float second) {
    asm volatile(
        "{\n"
        ".reg .pred never;\n"
        "setp.lt.f32 never, %0, 0f00000000;\n"
        "@never st.shared.f32 [%2], %0;\n"
        "setp.lt.f32 never, %1, 0f00000000;\n"
        "@never st.shared.f32 [%2], %1;\n"
        "}" ::"f"(first),
        "f"(second), "r"(shared_address(memory_.tiles))
        : "memory");
  }

  /// Waits for the products of the block before, and prepares the sums for those of the next.
  __device__ __forceinline__ void settle(Sums& sums, Steps& steps, bool is_first,
                                         RowState<float> (&total)[2]) {
    finish_products<0>();
    hold_in_place(sums.accumulators());
    if (!is_first) release_values();
    if (steps.starts_segment && !is_first) {
      fold(sums, steps.finished, total, steps.has_earlier, false);
      sums.clear();
      steps.has_earlier = true;
    } else {
      sums.rescale(steps.rescale);
    }
  }

  /// S = Q K^T of two blocks.
  __device__ __forceinline__ void start_scores(float (&scores)[2][kKeyGroups][4]) {
    memory_.key_barriers[keys_.stage()].full.wait(keys_.filled());
    const TileOperand keys(shared_address(memory_.keys[keys_.stage()]), Memory::kKeyBytes);
    const TileOperand queries(
        shared_address(memory_.queries) + static_cast<unsigned>(first_row_ * kBoxRowBytes),
        Memory::kQueryBytes);
    auto& sums = reinterpret_cast<float(&)[2 * kKeyGroups][4]>(scores);
    hold_in_place(sums);
    begin_products();
#pragma unroll
    for (int step = 0; step < kQuerySteps; ++step) {
      const int inside = step % 4 * 32;
      const std::uint64_t a = queries.descriptor(step / 4 * Memory::kQueryBytes + inside);
      const std::uint64_t b = keys.descriptor(step / 4 * Memory::kKeyBytes + inside);
      step == 0 ? start_product<Half, false>(sums, a, b) : start_product<Half, true>(sums, a, b);
    }
    commit_products();
  }

  /// O += P V.
  __device__ __forceinline__ void start_sums(Sums& sums) {
    memory_.value_barriers[values_.stage()].full.wait(values_.filled());
    const TileOperand values(shared_address(memory_.values[values_.stage()]), Memory::kValueBytes);
    hold_in_place(sums.accumulators());
    begin_products();
#pragma unroll
    for (int step = 0; step < kWeightSteps; ++step) {
      start_product<Half, true>(sums.accumulators(), weights_[step],
                                values.descriptor(step * 16 * kBoxRowBytes));
    }
    commit_products();
  }

  __device__ __forceinline__ void round_weights(const float (&weights)[kKeyGroups][4]) {
#pragma unroll
    for (int step = 0; step < kWeightSteps; ++step) {
      rounded_weights<Half>(weights, step, weights_[step]);
    }
  }

  __device__ __forceinline__ void fold(Sums& sums, const RowState<float> (&finished)[2],
                                       RowState<float> (&total)[2], bool has_earlier,
                                       bool is_last) {
    const Base2Exp exp_of{params_.forward.factor};
    const Fold<float> folds[2] = {{total[0], row_sum(finished[0]), exp_of},
                                  {total[1], row_sum(finished[1]), exp_of}};
    total[0] = folds[0].state;
    total[1] = folds[1].state;
    sums.fold(folds, &memory_.earlier[warp()][0][lane_], 32, has_earlier, is_last);
  }

  /// What it needs of the rows is computed anew: registers are full while the products run.
  __device__ __forceinline__ void store(const Sums& sums, const RowState<float> (&total)[2]) {
    const ForwardTile tile = memory_.tiles[queries_.filled()];
    const Sequence& sequence = call_.sequences[tile.sequence];
    const int first_row = tile.first_token * tile.heads.heads + row_of_thread();
    const int rows = static_cast<int>(sequence.query_len) * tile.heads.heads;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row + i * 8;
      const QueryRow query = tile.heads.query_of(row);
      const bool exists = row < rows;
      store_row(params_.forward, sequence, query, i, exists, total[i], sums, 0);
      if (exists && total[i].sum != 0 && !sums.is_finite(i)) mark_unfinished(tile, query);
    }
  }

  /// Marks the tile of the careful kernel that holds the row: 64 rows of a KV head.
  __device__ __forceinline__ void mark_unfinished(const ForwardTile& tile, const QueryRow& row) {
    const std::int64_t kv_head = row.head / call_.group;
    const std::int64_t careful_row = row.token * call_.group + row.head % call_.group;
    const std::int64_t careful_tile =
        (tile.sequence * call_.num_kv_heads + kv_head) * params_.forward.row_tiles +
        careful_row / kMmaRows;
    params_.forward.unfinished[0] = 1;
    params_.forward.unfinished[1 + careful_tile] = 1;
  }

  const HopperForwardParams& params_;
  const AttentionParams& call_;
  Memory& memory_;
  const int lane_;
  const int first_row_;  // of the warpgroup, in a tile
  std::uint32_t weights_[kWeightSteps][4];
  RingPosition<1> queries_;
  RingPosition<Memory::kKeyStages> keys_;
  RingPosition<Memory::kValueStages> values_;
};

template <class Half, int kColumns>
__global__ void __launch_bounds__(kForwardThreads, 1)
    forward_wgmma(const __grid_constant__ HopperForwardParams params) {
  using Memory = ForwardMemory<kColumns>;
  extern __shared__ unsigned char shared[];
  // Dynamic shared memory need not start at a multiple of 1024, which the swizzle counts from.
  auto& memory = *reinterpret_cast<Memory*>((reinterpret_cast<std::uintptr_t>(shared) + 1023) &
                                            ~std::uintptr_t{1023});
  if (threadIdx.x == 0) {
    constexpr int kWarps = kConsumers * kGroupThreads / 32;
    const auto init = [](BufferBarriers& barriers) {
      barriers.full.init(1);
      barriers.empty.init(kWarps);
    };
    init(memory.query_barriers);
    for (BufferBarriers& barriers : memory.key_barriers) init(barriers);
    for (BufferBarriers& barriers : memory.value_barriers) init(barriers);
    publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x < kGroupThreads) {
    give_registers<40>();
    if (threadIdx.x == 0) ForwardProducer<kColumns>(params, memory).run();
  } else {
    take_registers<232>();
    ForwardConsumer<Half, kColumns>(params, memory).run();
  }
}

}  // namespace ladon::cuda::hopper
