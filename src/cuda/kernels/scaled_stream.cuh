// ScaledStream: keys and values of one KV head of an int8 or fp8 cache as a stream of tiles in
// shared memory, a few tiles ahead of their use, for one warp.
//
// A tile is 32 rows of 128 bytes, as they are in memory: for each block of 64 keys the lower and
// the upper half of K, then of V, with the columns that this block of threads computes. Of two
// warps that share the work each has a stream: one half of K, then both halves of V with 64
// columns. Rows that do not exist and columns past the end are zeros: what is in memory there is
// not read. The 16-byte chunks of a row are permuted by the row's last three bits, so that the
// eight rows of a matrix are in different banks.
//
// Lane l finds the slots of rows l of a block's halves, from entries of the page table that were
// copied a block ahead, and leaves them in shared memory for the lanes that copy the rows. All that
// is needed once a tile is there too: registers decide how many warps a multiprocessor has. Slots
// have 32 bits: 2^32 of them, with keys, values and scales, are more than a GPU holds.
#pragma once

#include <cstdint>

#include "cuda/kernels/forward.cuh"
#include "cuda/kernels/tensor_core.cuh"

namespace ladon::cuda {

template <int kWarps, int kBuffers>
class ScaledStream {
  static_assert(kWarps == 1 || kWarps == 2);

 public:
  static constexpr int kRows = 32;
  static constexpr int kColumns = 128;
  static constexpr int kKeyParts = 2 / kWarps;  // of a block
  static constexpr int kParts = kKeyParts + 2;
  static constexpr int kValueColumns = kColumns / kWarps;
  static_assert(kBuffers <= kParts + 1, "entries of the page table must arrive within a block");

  /// Keys or values.
  struct alignas(16) Rows {
    const char* data;
    unsigned stride;  // bytes from slot to slot
    int columns;
    const float* scales;

    __device__ __forceinline__ const char* at(const char* first, unsigned slot) const {
      return first + static_cast<std::uint64_t>(slot) * stride;
    }
  };

  struct Memory {
    alignas(128) unsigned char tiles[kBuffers][kRows * kColumns];
    float scales[kBuffers][kRows];
    alignas(16) unsigned slots[kBlockKeys];
    std::int32_t pages[kBlockKeys];  // of the next block's keys, and where in its page a key is
    int slots_in_page[kBlockKeys];
    Rows rows[2];
    struct {
      const std::int32_t* pages;
      std::int64_t first_slot;
      std::int64_t ring_start;
      std::int64_t key_origin;
      int kv_len;
    } sequence;
  };

  __device__ __forceinline__ ScaledStream(const ForwardParams<float>& params,
                                          const Sequence& sequence, const ForwardTask& task,
                                          Memory& memory)
      : layout_(params.call.kv_layout), memory_(memory) {
    if (lane() != 0) return;
    // start() synchronizes.
    memory.sequence = {sequence.pages, sequence.first_slot, sequence.ring_start,
                       sequence.key_origin, static_cast<int>(sequence.kv_len)};
    const auto rows_of = [&](const Operand& operand, std::int64_t start, int columns,
                             const float* scales) {
      return Rows{
          static_cast<const char*>(operand.data) + start + task.kv_head * operand.head_stride,
          static_cast<unsigned>(operand.token_stride), columns,
          scales + task.kv_head * layout_.scale_head_stride};
    };
    memory.rows[0] = rows_of(params.call.k, sequence.k, static_cast<int>(params.call.head_dim),
                             layout_.k_scales);
    memory.rows[1] = rows_of(params.call.v, sequence.v + first_value(task),
                             value_columns_of(params, task), layout_.v_scales);
  }

  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ __forceinline__ static int warp() {
    return kWarps == 1 ? 0 : static_cast<int>(threadIdx.x) / 32;
  }
  /// The first of the columns of V, and their number.
  __device__ __forceinline__ static std::int64_t first_value(const ForwardTask& task) {
    return task.value_chunk * kColumns + warp() * kValueColumns;
  }
  __device__ __forceinline__ static int value_columns_of(const ForwardParams<float>& params,
                                                         const ForwardTask& task) {
    const std::int64_t left = params.call.value_dim - first_value(task);
    return static_cast<int>(left < 0 ? 0 : left < kValueColumns ? left : kValueColumns);
  }

  __device__ __forceinline__ int key_columns() const { return memory_.rows[0].columns; }
  __device__ __forceinline__ int value_columns() const { return memory_.rows[1].columns; }

  /// A block's first key, counted from the sequence's first that is held; negative where that is in
  /// the block.
  __device__ __forceinline__ int first_key(int block) const {
    return static_cast<int>(static_cast<std::int64_t>(block) * kBlockKeys -
                            memory_.sequence.key_origin);
  }

  /// Starts the copies of the first tiles.
  __device__ __forceinline__ void start(const BlockRange& blocks) {
    __syncwarp();
    block_ = blocks.begin;
    end_ = blocks.end;
    request_pages(block_);
    wait_for_all_copies();
    for (int i = 0; i < kBuffers - 1; ++i) issue(i);
  }

  /// Returns the buffer of the next tile, which has arrived. The copy of another one to the last
  /// buffer, which is not read any more, is started.
  __device__ __forceinline__ int next() {
    wait_for_copies<kBuffers - 2>();
    __syncwarp();
    issue(last_);
    last_ = last_ == kBuffers - 1 ? 0 : last_ + 1;
    return last_;
  }

 private:
  static constexpr unsigned kNoSlot = 0xffffffffU;

  __device__ __forceinline__ void issue(int buffer) {
    if (block_ < end_) {
      if (part_ == 0) {
        find_slots();
        request_pages(block_ + 1);
      }
      const bool keys = part_ < kKeyParts;
      const int half = kWarps == 1 ? part_ % 2 : keys ? warp() : part_ - kKeyParts;
      copy_tile(memory_.rows[keys ? 0 : 1], memory_.slots + half * kRows, buffer);
      if (++part_ == kParts) {
        part_ = 0;
        ++block_;
      }
    }
    commit_copies();
  }

  __device__ __forceinline__ void request_pages(int block) {
    if (layout_.page_size == 0 || block >= end_) return;
    const int size = static_cast<int>(layout_.page_size);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = first_key(block) + i * kRows + lane();
      if (key < 0 || key >= memory_.sequence.kv_len) continue;
      const int page = key / size;
      memory_.slots_in_page[i * kRows + lane()] = key - page * size;
      copy_async_4(shared_address(&memory_.pages[i * kRows + lane()]),
                   memory_.sequence.pages + page, 4);
    }
  }

  /// The slots of the current block's keys. next() has synchronized: those of the last have been
  /// read.
  __device__ __forceinline__ void find_slots() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = first_key(block_) + i * kRows + lane();
      std::int64_t slot = kNoSlot;
      if (key >= 0 && key < memory_.sequence.kv_len) {
        if (layout_.page_size != 0) {
          slot = memory_.pages[i * kRows + lane()] * layout_.page_size +
                 memory_.slots_in_page[i * kRows + lane()];
        } else if (layout_.ring_slots == 0) {
          slot = memory_.sequence.first_slot + key;
        } else {
          const std::int64_t place = memory_.sequence.ring_start + key;
          slot = memory_.sequence.first_slot +
                 (place >= layout_.ring_slots ? place - layout_.ring_slots : place);
        }
      }
      memory_.slots[i * kRows + lane()] = static_cast<unsigned>(slot);
    }
    __syncwarp();
  }
  /// Whether all keys of the current block exist.
  __device__ __forceinline__ bool is_whole() const {
    const int first = first_key(block_);
    return first >= 0 && first + kBlockKeys <= memory_.sequence.kv_len;
  }

  __device__ __forceinline__ void copy_tile(const Rows rows, const unsigned* slots, int buffer) {
    // What follows from the lane is computed for each tile, or it would be kept in registers.
    const int own_lane = static_cast<int>(fresh(lane()));
    const unsigned own = slots[own_lane];
    const unsigned scale_stride = static_cast<unsigned>(layout_.scale_slot_stride);
    copy_async_4(
        shared_address(&memory_.scales[buffer][own_lane]),
        rows.scales + (own == kNoSlot ? 0 : static_cast<std::uint64_t>(own) * scale_stride),
        own == kNoSlot ? 0 : 4);
    // A lane copies one chunk of eight consecutive rows.
    const int chunk = own_lane % 8;
    const int first_row = own_lane / 8 * 8;
    // Products read half a tile or all of it.
    if (chunk >= 4 && rows.columns <= kColumns / 2) return;
    const uint4 low = *reinterpret_cast<const uint4*>(slots + first_row);
    const uint4 high = *reinterpret_cast<const uint4*>(slots + first_row + 4);
    const unsigned of_rows[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    // Row r's chunk is at to ^ (r << 4), r rows further.
    const unsigned to = shared_address(memory_.tiles[buffer]) + first_row * kColumns + chunk * 16;
    const char* const data = rows.data + chunk * 16;
    // Most tiles are whole, and need no test of each row.
    if (is_whole() && (rows.columns == kColumns || rows.columns == kColumns / 2)) {
#pragma unroll
      for (int row = 0; row < 8; ++row) {
        copy_async_16((to ^ (row << 4)) + row * kColumns, rows.at(data, of_rows[row]), 16);
      }
    } else {
      const int present = max(0, min(16, rows.columns - chunk * 16));
#pragma unroll
      for (int row = 0; row < 8; ++row) {
        const int count = of_rows[row] == kNoSlot ? 0 : present;
        copy_async_16((to ^ (row << 4)) + row * kColumns,
                      count == 0 ? rows.data : rows.at(data, of_rows[row]), count);
      }
    }
  }

  const KvLayout& layout_;
  Memory& memory_;
  // The next tile to copy.
  int block_ = 0;
  int end_ = 0;
  int part_ = 0;
  int last_ = kBuffers - 1;  // the buffer that next() has returned
};

}  // namespace ladon::cuda
