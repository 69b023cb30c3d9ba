// Decoding of heads with 129 to 256 columns of keys or values: up to 16 query rows of a KV head,
// 16-bit caches, every rule but dropout.
//
// A multiprocessor has one segment of 2048 keys, which are 32 blocks, and eight warps:
//   Eight blocks at a time, a warp has one: S = Q K^T (16 x 64), the block's maxima; then, when
//   those of the eight are known, the weights P, which stay in shared memory.
//   At last a warp has 32 columns of V: O += P V over all blocks in ascending order.
// With few segments a multiprocessor's copies are the limit, not memory: two have half the columns
// of V each then, and both compute the scores.
//
// The steps of a row are those of forward_mma.cuh in the same order, so the bits are the same: the
// running maximum follows from the blocks' maxima, a thread's sum of weights goes from warp to
// warp, and products are in no order but that of the keys. What comes out infinite or NaN is
// computed once more by one warp of forward_mma.cuh.
//
// Each warp streams what it needs through two buffers of 8 KiB: a quarter of a block of keys, 64 of
// up to 256 columns, or its columns of the values of two blocks or four. No warp waits for
// another's copies, and all eight have 64 to 128 KiB in flight. The slots of all keys are found
// first, so that no copy waits for a page table. One block of threads a multiprocessor, by 214 KiB
// of shared memory.
//
// H200, bf16, heads of 256, calls in a loop, us, and those of one or two warps of forward_mma.cuh
// with segments of 512 keys: one sequence, 16 query and 8 KV heads, 1024 tokens 20 and 44, 8192 39
// and 44, 32768 73 and 120; 2 KV heads, 32768 tokens 40 and 47, 131072 78 and 133; 8 sequences of
// 8192 137 and 229; 64 of 4096 518 and 787 (4.1 TB/s).
#pragma once

#include <cstdint>

#include "cuda/hopper/decode_long_stream.cuh"
#include "cuda/hopper/decode_steps.cuh"
#include "cuda/kernels/forward_mma.cuh"

namespace ladon::cuda::hopper {

template <class Half, int kColumns>
struct LongHeadMemory {
  typename LongHeadStream<Half, kColumns>::Memory stream;
  unsigned char queries[2][16 * kTileRowBytes];  // of 128 columns each
  uint4 weights[kLongBlocks][kBlockSteps][32];   // operands of products, by lane
  float rescales[kLongBlocks][16];               // of what was summed before a block, by row
  float maxima[2][kLongWarps][16];  // of blocks' scores, by row; of even and odd rounds
  float2 sums[kLongWarps][32];      // of weights up to a block, by lane
  float totals[16];
};

/// A warp has kColumns of the values: 32, or 16 of those that task.value_chunk says.
template <class Half, ForwardRules kRules, int kColumns>
class DecodeLongHead {
  using Stream = LongHeadStream<Half, kColumns>;
  static constexpr int kKeyBytes = Stream::kKeyBytes;
  static constexpr int kValueBytes = Stream::kValueBytes;
  static constexpr int kStageSteps = Stream::kKeyColumns / 16;
  // Where a warp has 16 columns, half of the sums are not used, and results are stored as four
  // groups.
  using Sums = ForwardSums<Half, 4>;

 public:
  using Memory = LongHeadMemory<Half, kColumns>;

  __device__ __forceinline__ DecodeLongHead(const ForwardParams<float>& params,
                                            const ForwardTask& task, const Sequence& sequence,
                                            Memory& memory)
      : params_(params),
        call_(params.call),
        task_(task),
        sequence_(sequence),
        memory_(memory),
        rows_(static_cast<int>(sequence.query_len * params.call.group)),
        lane_(static_cast<int>(threadIdx.x) % 32),
        warp_(static_cast<int>(threadIdx.x) / 32),
        heads_{static_cast<int>(task.kv_head * params.call.group),
               static_cast<int>(params.call.group)},
        stream_(params, sequence, task, memory.stream),
        sums_(min(static_cast<int>(params.call.value_dim), stream_.first_column() + kColumns),
              stream_.first_column() / 8) {}

  /// Returns whether the thread's sums are finite. Else the segment must be computed again.
  __device__ __forceinline__ bool run() {
    if (rows_ == 0) return true;
    BlockRange blocks = visible_blocks(call_.rules, sequence_, 0, (rows_ - 1) / call_.group);
    if (is_partial()) {
      blocks = blocks_in_segment(long_segments(), sequence_, blocks, task_.segment);
    }
    first_block_ = blocks.begin;
    num_blocks_ = blocks.end - blocks.begin;
    sums_.clear();
    if (num_blocks_ == 0) {
      if (!is_partial()) store_rows();
      return true;
    }
    stream_.start(blocks);
    load_queries();
    __syncthreads();
    add_weights_of_blocks();
    if (stream_.has_columns()) add_values();
    __syncthreads();  // totals are there
    is_partial() ? store_partial() : store_rows();
    return sums_.are_finite();
  }

 private:
  __device__ __forceinline__ bool is_partial() const { return params_.partials.maximum != nullptr; }

  /// The thread's two rows.
  __device__ __forceinline__ int row_of(int i) const { return lane_ / 4 + i * 8; }

  /// Into shared memory; zeros where there are none.
  __device__ __forceinline__ void load_queries() {
    const int column = lane_ * kChunkElements;
#pragma unroll
    for (int i = 0; i < 16 / kLongWarps; ++i) {
      const int row = warp_ + i * kLongWarps;
      uint4 eight = make_uint4(0, 0, 0, 0);
      if (row < rows_ && column < call_.head_dim) {
        const auto [token, head] = heads_.query_of(row);
        eight = *reinterpret_cast<const uint4*>(static_cast<const Half*>(call_.q.data) +
                                                sequence_.q + token * call_.q.token_stride +
                                                head * call_.q.head_stride + column);
      }
      *reinterpret_cast<uint4*>(memory_.queries[lane_ / kTileChunks] +
                                chunk_offset(row, lane_ % kTileChunks)) = eight;
    }
  }

  /// All blocks' weights, and what sums must be multiplied by before each block, into shared
  /// memory.
  __device__ __forceinline__ void add_weights_of_blocks() {
    ForwardScores<Half, kRules> rules(params_, sequence_, heads_, row_of(0), rows_);
#pragma unroll 1
    for (int first = 0; first < num_blocks_; first += kLongWarps) {
      const int block = first + warp_;
      const bool is_active = block < num_blocks_;
      auto& maxima = memory_.maxima[first / kLongWarps % 2];
      ThreadScores scores = {};
      if (is_active) {
#pragma unroll 1
        for (int stage = 0; stage < stream_.key_stages(); ++stage) multiply_keys(scores, stage);
        rules.apply_rules(scores, first_block_ + block, nullptr);
        const float largest[2] = {largest_score(scores, 0, -INFINITY),
                                  largest_score(scores, 1, -INFINITY)};
        if (lane_ % 4 == 0) {
          maxima[warp_][row_of(0)] = largest[0];
          maxima[warp_][row_of(1)] = largest[1];
        }
      }
      __syncthreads();
      float rescale[2] = {1, 1};
      float base[2] = {0, 0};
      follow_maxima(maxima, min(kLongWarps, num_blocks_ - first), base, rescale);
      if (is_active) {
        if (lane_ % 4 == 0) {
          memory_.rescales[block][row_of(0)] = rescale[0];
          memory_.rescales[block][row_of(1)] = rescale[1];
        }
        make_weights<Half>(scores, base, params_.factor, memory_.weights[block], lane_);
      }
      // Products with values need all weights, but not their sums.
      if (first + kLongWarps >= num_blocks_) __syncthreads();
      if (is_active) add_to_sums(block, rescale, scores);
    }
  }

  /// Adds the products of queries with a quarter of a block of keys.
  __device__ __forceinline__ void multiply_keys(ThreadScores& scores, int stage) {
    unsigned queries[kStageSteps][4];
    const unsigned query_tile = shared_address(memory_.queries[stage / 2]);
#pragma unroll
    for (int step = 0; step < kStageSteps; ++step) {
      const int chunk = (stage % 2 * kStageSteps + step) * 2 + lane_ / 16;
      load_matrices(queries[step], query_tile + chunk_offset(lane_ % 16, chunk));
    }
    const unsigned offset =
        (lane_ % 8 + lane_ / 16 * 8) * kKeyBytes + ((lane_ / 8 % 2) ^ (lane_ % 8)) * 16;
    const unsigned keys = stream_.wait();
#pragma unroll
    for (int step = 0; step < kStageSteps; ++step) {
#pragma unroll
      for (int pair = 0; pair < kKeyGroups / 2; ++pair) {
        unsigned key[4];
        load_matrices(key, keys + pair * 16 * kKeyBytes + (offset ^ (step << 5)));
        multiply_add<Half>(scores[pair * 2], queries[step], key[0], key[1]);
        multiply_add<Half>(scores[pair * 2 + 1], queries[step], key[2], key[3]);
      }
    }
    stream_.release();
  }

  /// The rows' running maxima over up to eight blocks, by each warp alike. Leaves what the weights
  /// of the warp's own block are relative to, and what was summed before must be multiplied by.
  __device__ __forceinline__ void follow_maxima(const float (&maxima)[kLongWarps][16], int count,
                                                float (&base)[2], float (&rescale)[2]) {
#pragma unroll
    for (int b = 0; b < kLongWarps; ++b) {
      if (b >= count) break;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float largest = fmaxf(maximum_[i], maxima[b][row_of(i)]);
        const MaximumStep step(maximum_[i], largest, params_.factor);
        maximum_[i] = step.maximum;
        if (b == warp_) {
          base[i] = step.base;
          rescale[i] = step.rescale;
        }
      }
    }
  }

  /// The sums of the blocks before come from the warp before, or from the last one, which had the
  /// last block of the eight before: all threads have met since.
  __device__ __forceinline__ void add_to_sums(int block, const float (&rescale)[2],
                                              const ThreadScores& weights) {
    float2 sums = make_float2(0, 0);
    if (warp_ > 0) asm volatile("bar.sync %0, 64;" ::"r"(warp_) : "memory");
    if (block > 0) sums = memory_.sums[(warp_ + kLongWarps - 1) % kLongWarps][lane_];
    sums = add_weights(sums, rescale, weights);
    if (block + 1 == num_blocks_) return store_totals(memory_.totals, sums, lane_);
    memory_.sums[warp_][lane_] = sums;
    if (warp_ + 1 < kLongWarps) {
      asm volatile("bar.arrive %0, 64;" ::"r"(warp_ + 1) : "memory");
    }
  }

  /// O of the warp's columns, over all blocks.
  __device__ __forceinline__ void add_values() {
#pragma unroll 1
    for (int block = 0; block < num_blocks_; block += Stream::kPairedBlocks) {
      const unsigned values = stream_.wait();
#pragma unroll
      for (int i = 0; i < Stream::kPairedBlocks; ++i) {
        if (block + i >= num_blocks_) break;
        add_block(values + i * kBlockKeys * kValueBytes, block + i);
      }
      stream_.release();
    }
  }
  __device__ __forceinline__ void add_block(unsigned values, int block) {
    auto& sums = sums_.accumulators();
    const auto& rescales = memory_.rescales[block];
    sums_.rescale(make_float2(rescales[row_of(0)], rescales[row_of(1)]));
    const unsigned offset = Stream::value_offset(lane_ % 16, lane_ / 16);
#pragma unroll
    for (int step = 0; step < kBlockSteps; ++step) {
      const uint4 four = memory_.weights[block][step][lane_];
      const unsigned weights[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int pair = 0; pair < kColumns / 16; ++pair) {
        unsigned value[4];
        load_matrices_transposed(value, values + step * 16 * kValueBytes + (offset ^ (pair << 5)));
        multiply_add<Half>(sums[pair * 2], weights, value[0], value[1]);
        multiply_add<Half>(sums[pair * 2 + 1], weights, value[2], value[3]);
      }
    }
  }

  /// Empty where no key is seen.
  __device__ __forceinline__ RowState<float> state(int i) const {
    if (num_blocks_ == 0) return {};
    return {maximum_[i], memory_.totals[row_of(i)]};
  }

  __device__ __forceinline__ void store_partial() const {
    const Partials<float>& partials = params_.partials;
    const std::int64_t place = task_.sequence * call_.num_kv_heads + task_.kv_head;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (row_of(i) >= rows_) continue;
      const std::int64_t index = partials.index(place, task_.segment, row_of(i));
      if (lane_ % 4 == 0 && stream_.first_column() == 0) {
        partials.maximum[index] = state(i).maximum;
        partials.sum[index] = state(i).sum;
      }
      sums_.store_partial(i, partials.out + index * call_.value_dim + stream_.first_column());
    }
  }
  __device__ __forceinline__ void store_rows() const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      store_row(params_, sequence_, {i, heads_.query_of(row_of(i)), row_of(i) < rows_}, state(i),
                sums_, stream_.first_column());
    }
  }

  const ForwardParams<float>& params_;
  const AttentionParams& call_;
  const ForwardTask& task_;
  const Sequence& sequence_;
  Memory& memory_;
  const int rows_;
  const int lane_;
  const int warp_;
  const RowHeads heads_;
  Stream stream_;
  Sums sums_;
  // Of the segment's blocks, those that are seen. All others are counted from the first of them.
  int first_block_ = 0;
  int num_blocks_ = 0;
  float maximum_[2] = {-INFINITY, -INFINITY};
};

}  // namespace ladon::cuda::hopper
