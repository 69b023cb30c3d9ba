// Decoding with few segments: up to 16 query rows of a KV head, heads up to 128, 16-bit caches, a
// positive scale and a window.
//
// A multiprocessor has one segment of 512 keys, and its eight warps have a block of 64 keys each:
//   S = Q K^T (16 x 64), the block's maxima; then, when those of all blocks are known, the weights
//   P, in shared memory; O += P V for 16 of the 128 columns and all blocks in ascending order.
// The steps of a row are those of forward_mma.cuh in the same order, so the bits are the same: the
// running maximum follows from the blocks' maxima, a thread's sum of weights goes from warp to
// warp, and products are in no order but that of the keys. What comes out infinite or NaN is
// computed once more by one warp of forward_mma.cuh.
//
// One warp or two have little in flight and wait for each instruction: 8192 tokens of 8 KV heads
// are 128 segments of 256 KiB. Here 192 KiB are requested at once, and the rest when the first keys
// are used up. One block of threads a multiprocessor, by 211 KiB of shared memory. With the folding
// that follows 21 us on an H200, where two warps a segment take 29.
//
// Most of that is latency, so a short segment takes nearly as long as a whole one, and a second
// wave of them as long as the first. Where the last segments have at most 256 keys and would be a
// second wave (8193 tokens: 136 segments, 132 multiprocessors), a block of threads computes two of
// them at once: four warps have a segment each, and 32 columns.
//
// Tried and lost: segments of 1024 keys, of which a cluster of two blocks computed half the scores
// and half the columns each (25.5 us, and 37 with a ninth, short segment); the same by one block
// (31 us); short last segments two to a block, one after the other (27.2 us instead of the 28.4 of
// two warps a segment).
#pragma once

#include <cstdint>

#include "cuda/hopper/decode_steps.cuh"
#include "cuda/kernels/dependent_launch.cuh"
#include "cuda/kernels/forward_mma.cuh"

namespace ladon::cuda::hopper {

inline constexpr int kSegmentWarps = short_segments().blocks();
inline constexpr int kPairWarps = kSegmentWarps / 2;  // of each of two short segments

/// Of a segment with up to kWarps blocks of keys.
template <int kWarps>
struct SegmentMemory {
  // Values of these blocks have tiles of their own. The others replace the keys of their block.
  static constexpr int kSpareTiles = kWarps / 2;
  alignas(128) unsigned char tiles[kWarps + kSpareTiles][kTileBytes];
  uint4 weights[kWarps][kBlockSteps][32];  // operands of products, by lane
  float maxima[kWarps][16];                // of a block's scores, by row
  float2 sums[kWarps][32];                 // of weights up to a block, by lane
  float totals[16];

  __device__ __forceinline__ unsigned char* keys(int block) { return tiles[block]; }
  __device__ __forceinline__ unsigned char* values(int block) {
    return tiles[block < kSpareTiles ? kWarps + block : block];
  }
};

/// A segment by kWarps warps: all of a block of threads, or half of them.
template <class Half, int kWarps>
class DecodeSegment {
  using Scores = ThreadScores;
  static constexpr int kSumGroups = kValueGroups / kWarps;  // of 8 columns of a warp
  static constexpr std::int64_t kNoRow = INT64_MIN;

 public:
  using Memory = SegmentMemory<kWarps>;

  __device__ __forceinline__ DecodeSegment(const ForwardParams<float>& params,
                                           const ForwardTask& task, const Sequence& sequence,
                                           Memory& memory)
      : params_(params),
        call_(params.call),
        task_(task),
        sequence_(sequence),
        memory_(memory),
        rows_(static_cast<int>(sequence.query_len * params.call.group)),
        lane_(static_cast<int>(threadIdx.x) % 32),
        warp_(static_cast<int>(threadIdx.x) / 32 % kWarps),
        first_barrier_(static_cast<int>(threadIdx.x) / 32 / kWarps * kWarps),
        heads_{static_cast<int>(task.kv_head * params.call.group),
               static_cast<int>(params.call.group)},
        sums_(static_cast<int>(params.call.value_dim), kSumGroups * warp_) {}

  /// Returns whether the thread's sums are finite. Else the segment must be computed again.
  __device__ __forceinline__ bool run() {
    if (rows_ == 0) return true;
    BlockRange blocks = visible_blocks(call_.rules, sequence_, 0, (rows_ - 1) / call_.group);
    blocks = blocks_in_segment(short_segments(), sequence_, blocks, task_.segment);
    if (blocks.begin == blocks.end) return true;
    const int first = blocks.begin / kSegmentWarps * kSegmentWarps;
    begin_ = blocks.begin - first;
    end_ = blocks.end - first;
    block_ = first + warp_;
    is_active_ = warp_ >= begin_ && warp_ < end_;

    find_slots();
    copy_tile(call_.k, sequence_.k, call_.head_dim, memory_.keys(warp_));
    if (warp_ < Memory::kSpareTiles) copy_values();
    commit_copies();
    Scores scores = {};
    multiply_keys(scores);
    if (warp_ >= Memory::kSpareTiles) {
      copy_values();
      commit_copies();
    }
    weigh(scores);
    add_values();
    store_partial();
    return sums_.are_finite();
  }

 private:
  /// The warps of this segment.
  __device__ __forceinline__ void synchronize() const {
    if constexpr (kWarps == kSegmentWarps) {
      __syncthreads();
    } else {
      asm volatile("bar.sync %0, %1;" ::"r"(kSegmentWarps + first_barrier_), "n"(32 * kWarps)
                   : "memory");
    }
  }

  /// The thread's two rows.
  __device__ __forceinline__ int row_of(int i) const { return lane_ / 4 + i * 8; }

  /// Those of rows lane and lane + 32 of the warp's block; -1 where there is none.
  __device__ __forceinline__ void find_slots() {
    const auto first =
        static_cast<int>(static_cast<std::int64_t>(block_) * kBlockKeys - sequence_.key_origin);
    hopper::find_slots(call_.kv_layout, sequence_, first + lane_, 32, slots_);
    if (!is_active_) slots_[0] = slots_[1] = -1;
  }

  /// The rows of the warp's block; zeros where there are none.
  __device__ __forceinline__ void copy_tile(const Operand& operand, std::int64_t start,
                                            std::int64_t columns, unsigned char* tile) {
    if (!is_active_) return;
    const int chunk = lane_ % kTileChunks;
    const bool exists = chunk * kChunkElements < columns;
    const Half* const data = static_cast<const Half*>(operand.data) + start +
                             task_.kv_head * operand.head_stride + chunk * kChunkElements;
    const unsigned to = shared_address(tile);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::int64_t row = slots_[i] < 0 ? kNoRow : slots_[i] * operand.token_stride;
#pragma unroll 4
      for (int pair = 0; pair < 16; ++pair) {
        const int owner = pair * 2 + lane_ / kTileChunks;
        const std::int64_t from = __shfl_sync(0xffffffffU, row, owner);
        const bool reads = exists && from != kNoRow;
        copy_async_16_once(to + chunk_offset(i * 32 + owner, chunk), reads ? data + from : data,
                           reads ? 16 : 0);
      }
    }
  }
  __device__ __forceinline__ void copy_values() {
    if (warp_ < Memory::kSpareTiles) commit_copies();  // keys are waited for alone
    copy_tile(call_.v, sequence_.v, call_.value_dim, memory_.values(warp_));
  }

  /// The thread's part of a query row. Found once: with a division for each pair of elements, these
  /// loads were a third of all instructions, each of which is fetched for a single use.
  __device__ __forceinline__ const unsigned* query_row(int i) const {
    const auto [token, head] = heads_.query_of(min(row_of(i), rows_ - 1));
    return reinterpret_cast<const unsigned*>(static_cast<const Half*>(call_.q.data) + sequence_.q +
                                             token * call_.q.token_stride +
                                             head * call_.q.head_stride + lane_ % 4 * 2);
  }

  __device__ __forceinline__ void multiply_keys(Scores& scores) {
    const unsigned* const query_rows[2] = {query_row(0), query_row(1)};
    const bool exist[2] = {row_of(0) < rows_, row_of(1) < rows_};
    const auto columns = static_cast<int>(call_.head_dim);
    unsigned queries[kQuerySteps][4];
#pragma unroll
    for (int step = 0; step < kQuerySteps; ++step) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        // Eight columns at a time are there or not.
        const int column = step * 16 + e / 2 * 8;
        queries[step][e] = exist[e % 2] && column < columns ? query_rows[e % 2][column / 2] : 0;
      }
    }
    warp_ < Memory::kSpareTiles ? wait_for_copies<1>() : wait_for_copies<0>();
    __syncwarp();
    if (is_active_) {
      const unsigned keys = shared_address(memory_.keys(warp_));
      const unsigned offset = chunk_offset(lane_ % 8 + lane_ / 16 * 8, lane_ / 8 % 2);
#pragma unroll
      for (int step = 0; step < kQuerySteps; ++step) {
        // As forward_mma.cuh: half of the steps, or all.
        if (step >= kQuerySteps / 2 && call_.head_dim <= kTileColumns / 2) break;
#pragma unroll
        for (int pair = 0; pair < kKeyGroups / 2; ++pair) {
          unsigned key[4];
          load_matrices(key, keys + pair * 16 * kTileRowBytes + (offset ^ (step << 5)));
          multiply_add<Half>(scores[pair * 2], queries[step], key[0], key[1]);
          multiply_add<Half>(scores[pair * 2 + 1], queries[step], key[2], key[3]);
        }
      }
    }
    __syncwarp();  // the tile is used up
  }

  /// Scores become weights in shared memory. Leaves the rows' states and what sums must be
  /// multiplied by before each block.
  __device__ __forceinline__ void weigh(Scores& scores) {
    ForwardScores<Half, ForwardRules::kWindow> rules(params_, sequence_, heads_, row_of(0), rows_);
    if (is_active_) {
      rules.apply_rules(scores, block_, nullptr);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float largest = -INFINITY;
#pragma unroll
        for (int n = 0; n < kKeyGroups; ++n) {
          largest = fmaxf(largest, fmaxf(scores[n][i * 2], scores[n][i * 2 + 1]));
        }
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffU, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffU, largest, 2));
        if (lane_ % 4 == 0) memory_.maxima[warp_][row_of(i)] = largest;
      }
    }
    synchronize();
    float base[2] = {0, 0};
    float rescale[2] = {1, 1};
#pragma unroll
    for (int b = 0; b < kWarps; ++b) {
      rescales_[b] = make_float2(1, 1);
      if (b < begin_ || b >= end_) continue;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float largest = fmaxf(maximum_[i], memory_.maxima[b][row_of(i)]);
        const MaximumStep step(maximum_[i], largest, params_.factor);
        maximum_[i] = step.maximum;
        (i == 0 ? rescales_[b].x : rescales_[b].y) = step.rescale;
        if (b == warp_) {
          base[i] = step.base;
          rescale[i] = step.rescale;
        }
      }
    }
    if (!is_active_) return;
    make_weights<Half>(scores, base, params_.factor, memory_.weights[warp_], lane_);
    add_weights(scores, rescale);
  }

  /// To the sums of the blocks before. Values are still on their way.
  __device__ __forceinline__ void add_weights(const Scores& weights, const float (&rescale)[2]) {
    float2 sums = make_float2(0, 0);
    if (warp_ > begin_) {
      asm volatile("bar.sync %0, 64;" ::"r"(first_barrier_ + warp_) : "memory");
      sums = memory_.sums[warp_ - 1][lane_];
    }
    sums = hopper::add_weights(sums, rescale, weights);
    if (warp_ + 1 < end_) {
      memory_.sums[warp_][lane_] = sums;
      asm volatile("bar.arrive %0, 64;" ::"r"(first_barrier_ + warp_ + 1) : "memory");
      return;
    }
    store_totals(memory_.totals, sums, lane_);
  }

  /// O of the warp's columns, over all blocks.
  __device__ __forceinline__ void add_values() {
    sums_.clear();
    if (warp_ < Memory::kSpareTiles) wait_for_copies<0>();
    synchronize();
    add_blocks<0, Memory::kSpareTiles>();
    wait_for_copies<0>();
    synchronize();
    add_blocks<Memory::kSpareTiles, kWarps>();
  }
  template <int kBegin, int kEnd>
  __device__ __forceinline__ void add_blocks() {
    if (first_column() >= call_.value_dim) return;
    auto& sums = sums_.accumulators();
    unsigned offsets[kSumGroups / 2];
#pragma unroll
    for (int pair = 0; pair < kSumGroups / 2; ++pair) {
      offsets[pair] = chunk_offset(lane_ % 16, kSumGroups * warp_ + 2 * pair + lane_ / 16);
    }
#pragma unroll
    for (int b = kBegin; b < kEnd; ++b) {
      if (b < begin_ || b >= end_) continue;
      sums_.rescale(rescales_[b]);
      const unsigned values = shared_address(memory_.values(b));
#pragma unroll
      for (int step = 0; step < kBlockSteps; ++step) {
        const uint4 four = memory_.weights[b][step][lane_];
        const unsigned weights[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int pair = 0; pair < kSumGroups / 2; ++pair) {
          unsigned value[4];
          load_matrices_transposed(value, values + offsets[pair] + step * 16 * kTileRowBytes);
          multiply_add<Half>(sums[pair * 2], weights, value[0], value[1]);
          multiply_add<Half>(sums[pair * 2 + 1], weights, value[2], value[3]);
        }
      }
    }
  }

  __device__ __forceinline__ int first_column() const { return warp_ * kSumGroups * 8; }

  __device__ __forceinline__ RowState<float> state(int i) const {
    return {maximum_[i], memory_.totals[row_of(i)]};
  }

  __device__ __forceinline__ void store_partial() const {
    const Partials<float>& partials = params_.partials;
    const std::int64_t place = task_.sequence * call_.num_kv_heads + task_.kv_head;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (row_of(i) >= rows_) continue;
      const std::int64_t index = partials.index(place, task_.segment, row_of(i));
      if (lane_ % 4 == 0 && warp_ == 0) {
        partials.maximum[index] = state(i).maximum;
        partials.sum[index] = state(i).sum;
      }
      sums_.store_partial(i, partials.out + index * call_.value_dim + first_column());
    }
  }

  const ForwardParams<float>& params_;
  const AttentionParams& call_;
  const ForwardTask& task_;
  const Sequence& sequence_;
  Memory& memory_;
  const int rows_;
  const int lane_;
  const int warp_;           // of the segment's
  const int first_barrier_;  // of those of the segment's warps
  const RowHeads heads_;
  ForwardSums<Half, kSumGroups> sums_;
  // Of the segment's blocks, those that are seen; and the warp's own.
  int begin_ = 0;
  int end_ = 0;
  int block_ = 0;
  bool is_active_ = false;
  std::int64_t slots_[2];
  float maximum_[2] = {-INFINITY, -INFINITY};
  float2 rescales_[kWarps];
};

}  // namespace ladon::cuda::hopper
