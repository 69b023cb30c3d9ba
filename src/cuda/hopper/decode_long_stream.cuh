// Keys and values of one segment as streams in shared memory, one for each of the eight warps of
// decode_long_heads.cuh.
//
// A warp requests what it needs itself, into two buffers of 8 KiB in turn: first its blocks of
// keys, 64 columns at a time, then its 32 or 16 columns of the values of all blocks, two or four
// blocks at a time.
#pragma once

#include <cstdint>

#include "cuda/hopper/decode_steps.cuh"
#include "cuda/kernels/forward.cuh"
#include "cuda/kernels/tensor_core.cuh"
#include "cuda/kernels/tile_stream.cuh"

namespace ladon::cuda::hopper {

inline constexpr int kLongWarps = 8;
inline constexpr int kLongBlocks = long_segments().blocks();

/// kColumns: of values, for a warp. Blocks are counted from the first that is seen.
template <class Half, int kColumns>
class LongHeadStream {
 public:
  static constexpr int kBufferBytes = 8192;
  static constexpr int kKeyColumns = 64;             // in a buffer
  static constexpr int kKeyBytes = kKeyColumns * 2;  // of a key in it
  static constexpr int kValueBytes = kColumns * 2;
  static constexpr int kPairedBlocks = kBufferBytes / (kBlockKeys * kValueBytes);  // in a buffer
  static_assert(kBlockKeys * kKeyBytes == kBufferBytes);

  struct Memory {
    alignas(128) unsigned char buffers[kLongWarps][2][kBufferBytes];
    int slots[kLongBlocks * kBlockKeys];  // -1: no key; a block's in the order of slot_index()
  };

  __device__ __forceinline__ LongHeadStream(const ForwardParams<float>& params,
                                            const Sequence& sequence, const ForwardTask& task,
                                            Memory& memory)
      : call_(params.call),
        sequence_(sequence),
        kv_head_(task.kv_head),
        memory_(memory),
        lane_(static_cast<int>(threadIdx.x) % 32),
        warp_(static_cast<int>(threadIdx.x) / 32),
        key_stages_(static_cast<int>(params.call.head_dim + kKeyColumns - 1) / kKeyColumns),
        first_column_((static_cast<int>(task.value_chunk) * kLongWarps + warp_) * kColumns) {}

  /// Buffers that a block of keys fills.
  __device__ __forceinline__ int key_stages() const { return key_stages_; }
  /// The warp's first column of values.
  __device__ __forceinline__ int first_column() const { return first_column_; }
  __device__ __forceinline__ bool has_columns() const { return first_column_ < call_.value_dim; }
  /// Where a chunk of its columns is, of a row of a block.
  __device__ __forceinline__ static unsigned value_offset(int row, int chunk) {
    // 128 bytes, which are all banks, have two or four rows. Their chunks are permuted so that
    // eight neighbouring rows use all banks.
    constexpr int kRows = 128 / kValueBytes;
    return static_cast<unsigned>(row * kValueBytes + ((chunk ^ (row / kRows % kValueChunks)) * 16));
  }

  /// Requests the first two buffers. All threads of the block call it.
  __device__ __forceinline__ void start(const BlockRange& blocks) {
    num_blocks_ = blocks.end - blocks.begin;
    find_slots(blocks.begin);
    __syncthreads();
    next_key_block_ = warp_;
    next_value_block_ = has_columns() ? 0 : num_blocks_;
    request();
    request();
  }

  /// The buffer that was requested first, when it has arrived.
  __device__ __forceinline__ unsigned wait() {
    wait_for_copies<1>();
    __syncwarp();
    return shared_address(memory_.buffers[warp_][used_++ % 2]);
  }
  /// To be filled again.
  __device__ __forceinline__ void release() {
    __syncwarp();
    request();
  }

 private:
  static constexpr int kValueChunks = kColumns / kChunkElements;

  /// Rows r, r + 8, r + 16 and r + 24 of a block are neighbours here: a lane copies all four.
  __device__ __forceinline__ static int slot_index(int row) {
    return row / 32 * 32 + row % 8 * 4 + row / 8 % 4;
  }

  /// Those of all keys of a segment, whichever of its blocks is the first.
  __device__ __forceinline__ void find_slots(int first_block) {
    constexpr int kThreads = kLongWarps * 32;
    const auto first = static_cast<int>(static_cast<std::int64_t>(first_block) * kBlockKeys -
                                        sequence_.key_origin);
    const auto thread = static_cast<int>(threadIdx.x);
    std::int64_t slots[kLongBlocks * kBlockKeys / kThreads];
    hopper::find_slots(call_.kv_layout, sequence_, first + thread, kThreads, slots);
#pragma unroll
    for (int i = 0; i < kLongBlocks * kBlockKeys / kThreads; ++i) {
      const int row = thread + i * kThreads;
      memory_.slots[row / kBlockKeys * kBlockKeys + slot_index(row % kBlockKeys)] =
          static_cast<int>(slots[i]);
    }
  }

  /// Starts the next copy to a buffer of the warp that is used up: of its keys, then of its values.
  /// There is a group of copies for each request, be it empty.
  __device__ __forceinline__ void request() {
    const unsigned to = shared_address(memory_.buffers[warp_][requested_++ % 2]);
    if (next_key_block_ < num_blocks_) {
      copy_keys(to);
      if (++next_key_stage_ == key_stages_) {
        next_key_stage_ = 0;
        next_key_block_ += kLongWarps;
      }
    } else if (next_value_block_ < num_blocks_) {
      copy_values(to);
      next_value_block_ += kPairedBlocks;
    }
    commit_copies();
  }

  /// Copies a lane's chunk of one row; zeros where it does not exist.
  __device__ __forceinline__ static void copy_chunk(unsigned to, const char* data, int slot,
                                                    int row_bytes, bool exists) {
    copy_async_16_once(to, data + static_cast<std::int64_t>(max(slot, 0)) * row_bytes,
                       exists && slot >= 0 ? 16 : 0);
  }
  __device__ __forceinline__ const char* rows_of(const Operand& operand, std::int64_t start,
                                                 int column) const {
    return reinterpret_cast<const char*>(static_cast<const Half*>(operand.data) + start +
                                         kv_head_ * operand.head_stride + column);
  }

  /// 64 columns of a block's keys. A lane has one chunk of 16 rows. The chunks of a row are
  /// permuted by its last three bits.
  __device__ __forceinline__ void copy_keys(unsigned buffer) {
    const int chunk = lane_ % 8;
    const int column = next_key_stage_ * kKeyColumns + chunk * kChunkElements;
    const bool exists = column < call_.head_dim;
    const char* const data = rows_of(call_.k, sequence_.k, exists ? column : 0);
    const int row_bytes = static_cast<int>(call_.k.token_stride) * 2;
    const int row = lane_ / 8;  // the first
    const int* const slots = memory_.slots + next_key_block_ * kBlockKeys + slot_index(row);
    const unsigned to = buffer + row * kKeyBytes + ((chunk ^ row) * 16);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int four = 0; four < 2; ++four) {
        const int4 found = *reinterpret_cast<const int4*>(slots + slot_index(half * 32 + four * 4));
        const unsigned place = (to ^ (four << 6)) + (half * 32 + four * 4) * kKeyBytes;
        copy_chunk(place, data, found.x, row_bytes, exists);
        copy_chunk(place + 8 * kKeyBytes, data, found.y, row_bytes, exists);
        copy_chunk(place + 16 * kKeyBytes, data, found.z, row_bytes, exists);
        copy_chunk(place + 24 * kKeyBytes, data, found.w, row_bytes, exists);
      }
    }
  }

  /// The warp's columns of a few blocks of values. A lane has one chunk of 8 or 4 rows of each.
  __device__ __forceinline__ void copy_values(unsigned buffer) {
    constexpr int kHalves = 64 / (32 / kValueChunks * 4);  // of a block, which take turns
    const int chunk = lane_ % kValueChunks;
    const int column = first_column_ + chunk * kChunkElements;
    const bool exists = column < call_.value_dim;
    const char* const data = rows_of(call_.v, sequence_.v, exists ? column : 0);
    const int row_bytes = static_cast<int>(call_.v.token_stride) * 2;
    const int row = lane_ / kValueChunks % 8 + lane_ / (kValueChunks * 8) * 32;  // the first
    const int* const slots = memory_.slots + next_value_block_ * kBlockKeys + slot_index(row);
    const unsigned to = buffer + value_offset(row, chunk);
#pragma unroll
    for (int block = 0; block < kPairedBlocks; ++block) {
      if (next_value_block_ + block >= num_blocks_) break;
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const int4 found =
            *reinterpret_cast<const int4*>(slots + block * kBlockKeys + slot_index(half * 32));
        const unsigned place = to + (block * kBlockKeys + half * 32) * kValueBytes;
        copy_chunk(place, data, found.x, row_bytes, exists);
        copy_chunk(place + 8 * kValueBytes, data, found.y, row_bytes, exists);
        copy_chunk(place + 16 * kValueBytes, data, found.z, row_bytes, exists);
        copy_chunk(place + 24 * kValueBytes, data, found.w, row_bytes, exists);
      }
    }
  }

  const AttentionParams& call_;
  const Sequence& sequence_;
  const std::int64_t kv_head_;
  Memory& memory_;
  const int lane_;
  const int warp_;
  const int key_stages_;
  const int first_column_;
  int num_blocks_ = 0;
  // What is requested next.
  int next_key_block_ = 0;
  int next_key_stage_ = 0;
  int next_value_block_ = 0;
  unsigned requested_ = 0;
  unsigned used_ = 0;
};

}  // namespace ladon::cuda::hopper
