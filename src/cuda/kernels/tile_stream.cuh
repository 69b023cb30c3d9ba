// TileStream: keys and values of one KV head as a stream of 64 x 128 tiles in shared memory, a
// few tiles ahead of their use.
//
// For each block of keys come the tiles of K, 128 columns each, then the tile of V with the columns
// that this block of threads computes. Rows that do not exist and columns past the end are zeros:
// what is in memory there is not read. 16-byte rows are copied asynchronously; unaligned and int8
// rows go through registers.
//
// A tile's rows are kTileColumns 16-bit elements. The 16-byte chunks of a row are permuted by the
// row's last three bits, so that the eight rows of an 8x8 matrix are in different banks.
#pragma once

#include <cstdint>

#include "cuda/kernels/forward.cuh"
#include "cuda/kernels/tensor_core.cuh"

namespace ladon::cuda {

inline constexpr int kTileColumns = 128;
inline constexpr int kChunkElements = 8;                           // 16 bytes
inline constexpr int kTileChunks = kTileColumns / kChunkElements;  // of one row
inline constexpr int kTileRowBytes = kTileColumns * 2;
inline constexpr int kTileBytes = kBlockKeys * kTileRowBytes;
/// Buffers of a stream. Fewer where more blocks fit a multiprocessor for it.
constexpr int tile_buffers(int warps, bool scaled) { return warps == 1 || scaled ? 3 : 4; }

/// The byte offset of a chunk in a tile.
__device__ inline std::uint32_t chunk_offset(int row, int chunk) {
  return static_cast<std::uint32_t>(row * kTileRowBytes + ((chunk ^ (row & 7)) * 16));
}

template <int kWarps>
__device__ __forceinline__ void synchronize_warps() {
  if constexpr (kWarps == 1) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

/// 16 bytes: eight elements from memory, of which `count` exist. Half is what the tile holds.
template <class Half>
__device__ __forceinline__ uint4 load_eight(const Half* from, int count) {
  union {
    uint4 vector;
    Half elements[kChunkElements];
  } chunk;
  chunk.vector = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int i = 0; i < kChunkElements; ++i) {
    if (i < count) chunk.elements[i] = from[i];
  }
  return chunk.vector;
}
/// Eight integers as 16-bit floats, in which they are exact.
template <class Half>
__device__ __forceinline__ uint4 to_halves(uint2 integers) {
  const auto pair = [](unsigned word, int first) {
    const auto element = [word](int i) { return static_cast<signed char>(word >> (i * 8)); };
    return pack<Half>(static_cast<float>(element(first)), static_cast<float>(element(first + 1)));
  };
  return make_uint4(pair(integers.x, 0), pair(integers.x, 2), pair(integers.y, 0),
                    pair(integers.y, 2));
}
/// Eight int8, of which `count` exist.
__device__ __forceinline__ uint2 load_integers(const signed char* from, int count, bool aligned) {
  if (aligned && count == kChunkElements) return *reinterpret_cast<const uint2*>(from);
  union {
    uint2 vector;
    signed char elements[kChunkElements];
  } chunk;
  chunk.vector = make_uint2(0, 0);
#pragma unroll
  for (int i = 0; i < kChunkElements; ++i) {
    if (i < count) chunk.elements[i] = from[i];
  }
  return chunk.vector;
}

/// kScaled: rows may be int8 with scales.
template <class Half, int kWarps, bool kScaled>
class TileStream {
  static constexpr int kTileBuffers = tile_buffers(kWarps, kScaled);
  static constexpr int kTilesAhead = kTileBuffers - 1;

 public:
  struct Memory {
    alignas(128) unsigned char tiles[kTileBuffers][kTileBytes];
    float scales[kTileBuffers][kBlockKeys];  // of int8 rows
  };

  __device__ __forceinline__ TileStream(const ForwardParams<float>& params,
                                        const Sequence& sequence, const ForwardTask& task,
                                        Memory& memory)
      : params_(params),
        sequence_(sequence),
        memory_(memory),
        kv_head_(task.kv_head),
        first_value_(static_cast<int>(task.value_chunk) * kTileColumns),
        key_tiles_(static_cast<int>((params.call.head_dim + kTileColumns - 1) / kTileColumns)),
        lane_(static_cast<int>(threadIdx.x) % 32),
        looks_up_(params.call.kv_layout.page_size != 0 || params.call.kv_layout.ring_slots != 0 ||
                  params.call.kv_layout.k_scales != nullptr || !params.aligned_k ||
                  !params.aligned_v) {}

  /// Columns of a tile of K, and of the tile of V.
  __device__ __forceinline__ int key_columns(int part) const {
    return min(kTileColumns, static_cast<int>(params_.call.head_dim) - part * kTileColumns);
  }
  __device__ __forceinline__ int value_columns() const {
    return min(kTileColumns, static_cast<int>(params_.call.value_dim) - first_value_);
  }
  __device__ __forceinline__ int first_value() const { return first_value_; }
  __device__ __forceinline__ int key_tiles() const { return key_tiles_; }
  __device__ __forceinline__ bool scaled() const {
    return kScaled && params_.call.kv_layout.k_scales != nullptr;
  }

  /// Starts, or starts again, at the first tile of a block.
  __device__ __forceinline__ void start(const BlockRange& blocks) {
    wait_for_copies<0>();
    synchronize_warps<kWarps>();
    block_ = blocks.begin;
    end_ = blocks.end;
    if (looks_up_) find_slots(block_);
    part_ = 0;
    issued_ = 0;
    used_ = -kTilesAhead;
  }

  /// Starts the copy of one tile and returns the buffer of the tile that has arrived; negative in
  /// the first calls, when none has.
  __device__ __forceinline__ int next() {
    if (used_ >= 0) {
      wait_for_copies<kTilesAhead - 1>();
      synchronize_warps<kWarps>();
    }
    issue();
    const int used = used_++;
    return used < 0 ? used : used % kTileBuffers;
  }

 private:
  __device__ __forceinline__ void issue() {
    if (block_ < end_) {
      if (part_ == 0 && looks_up_) find_slots(block_ + 1);
      copy_tile(part_ < key_tiles_);
      ++issued_;
      if (++part_ > key_tiles_) {
        part_ = 0;
        ++block_;
      }
    }
    commit_copies();
  }

  /// Each lane looks up two of a block's 64 keys; -1 where there is none. A block ahead of its
  /// copies: a page table is in memory far away.
  __device__ __forceinline__ void find_slots(int next_block) {
    slots_[0] = next_slots_[0];
    slots_[1] = next_slots_[1];
    if (next_block >= end_) return;
    const std::int64_t first = first_key(next_block);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t key = first + half * 32 + lane_;
      next_slots_[half] = key >= 0 && key < sequence_.kv_len ? slot_of(static_cast<int>(key)) : -1;
    }
  }
  __device__ __forceinline__ std::int64_t first_key(int block) const {
    return static_cast<std::int64_t>(block) * kBlockKeys - sequence_.key_origin;
  }

  /// kv_slot() with divisions of 32 bits.
  __device__ __forceinline__ std::int64_t slot_of(int key) const {
    const KvLayout& layout = params_.call.kv_layout;
    if (layout.page_size != 0) {
      const int size = static_cast<int>(layout.page_size);
      return static_cast<std::int64_t>(sequence_.pages[key / size]) * size + key % size;
    }
    if (layout.ring_slots == 0) return sequence_.first_slot + key;
    std::int64_t place = sequence_.ring_start + key;
    if (place >= layout.ring_slots) place -= layout.ring_slots;
    return sequence_.first_slot + place;
  }

  __device__ __forceinline__ void copy_tile(bool keys) {
    const AttentionParams& call = params_.call;
    const Operand& operand = keys ? call.k : call.v;
    const float* scales = keys ? call.kv_layout.k_scales : call.kv_layout.v_scales;
    const bool aligned = keys ? params_.aligned_k : params_.aligned_v;
    const int columns = keys ? key_columns(part_) : value_columns();
    const int chunk = static_cast<int>(threadIdx.x) % kTileChunks;
    const std::int64_t start = (keys ? sequence_.k : sequence_.v) + kv_head_ * operand.head_stride +
                               (keys ? part_ * kTileColumns : first_value_) +
                               chunk * kChunkElements;
    const int buffer = issued_ % kTileBuffers;
    const unsigned tile = shared_address(memory_.tiles[buffer]);
    const int present = max(0, min(kChunkElements, columns - chunk * kChunkElements));
    // Products read half a tile or all of it.
    const bool is_read = chunk < kTileChunks / 2 || columns > kTileColumns / 2;
    if constexpr (kScaled) {
      if (scales != nullptr) return copy_quantised(operand, start, scales, keys, aligned, present);
    }
    const Half* data = static_cast<const Half*>(operand.data) + start;
    if (!aligned) {
      for_each_row([&](int row, std::int64_t slot) {
        const int count = slot < 0 ? 0 : present;
        const Half* from = data + (count == 0 ? 0 : slot * operand.token_stride);
        if (is_read) store_chunk(tile + chunk_offset(row, chunk), load_eight<Half>(from, count));
      });
      return;
    }
    if (!looks_up_) {
      const std::int64_t first = first_key(block_);
      const Half* const rows =
          data + (sequence_.first_slot + first + row_of_pass(0)) * operand.token_stride;
      const std::int64_t step = kRowsAtOnce * operand.token_stride;
      const auto copy_rows = [&](const auto& elements_of) {
        const Half* from = rows;
#pragma unroll 4
        for (int pass = 0; pass < kBlockKeys / kRowsAtOnce; ++pass, from += step) {
          const int row = row_of_pass(pass);
          const int count = elements_of(row);
          if (is_read) {
            copy_async_16(tile + chunk_offset(row, chunk), count == 0 ? operand.data : from,
                          count * 2);
          }
        }
      };
      // Most blocks are whole, and need no test of each row.
      if (first >= 0 && first + kBlockKeys <= sequence_.kv_len) {
        copy_rows([&](int) { return present; });
      } else {
        copy_rows([&](int row) {
          return first + row >= 0 && first + row < sequence_.kv_len ? present : 0;
        });
      }
      return;
    }
    for_each_row([&](int row, std::int64_t slot) {
      const int count = slot < 0 ? 0 : present;
      const Half* from =
          count == 0 ? static_cast<const Half*>(operand.data) : data + slot * operand.token_stride;
      if (is_read) copy_async_16(tile + chunk_offset(row, chunk), from, count * 2);
    });
  }

  /// Through registers, many rows at a time: each load waits for memory.
  __device__ __forceinline__ void copy_quantised(const Operand& operand, std::int64_t start,
                                                 const float* scales, bool keys, bool aligned,
                                                 int present) {
    constexpr int kPasses = kBlockKeys / kRowsAtOnce;
    constexpr int kBatch = 4;
    const KvLayout& layout = params_.call.kv_layout;
    const auto* data = static_cast<const signed char*>(operand.data) + start;
    const int chunk = static_cast<int>(threadIdx.x) % kTileChunks;
    const int buffer = issued_ % kTileBuffers;
    const unsigned tile = shared_address(memory_.tiles[buffer]);
#pragma unroll 1
    for (int first = 0; first < kPasses; first += kBatch) {
      uint2 integers[kBatch];
      float scale[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const std::int64_t slot = slot_of_pass(first + i);
        const int count = slot < 0 ? 0 : present;
        integers[i] =
            load_integers(data + (count == 0 ? 0 : slot * operand.token_stride), count, aligned);
        scale[i] =
            chunk != 0 || slot < 0
                ? 0.0F
                : scales[slot * layout.scale_slot_stride + kv_head_ * layout.scale_head_stride];
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int row = row_of_pass(first + i);
        // Values are bf16 whatever the queries are: products with their scales need its range.
        store_chunk(tile + chunk_offset(row, chunk),
                    keys ? to_halves<Half>(integers[i]) : to_halves<__nv_bfloat16>(integers[i]));
        if (chunk == 0) memory_.scales[buffer][row] = scale[i];
      }
    }
  }

  /// Those rows of a block of which this thread copies a chunk.
  __device__ __forceinline__ int row_of_pass(int pass) const {
    return pass * kRowsAtOnce + static_cast<int>(threadIdx.x) / kTileChunks;
  }
  __device__ __forceinline__ std::int64_t slot_of_pass(int pass) const {
    // Rows of one pass are all below 32, or none is.
    const bool is_low = pass * kRowsAtOnce < 32;
    return __shfl_sync(0xffffffffU, is_low ? slots_[0] : slots_[1], row_of_pass(pass) % 32);
  }
  /// Calls visit(row, slot) for each of them.
  template <class Visit>
  __device__ __forceinline__ void for_each_row(const Visit& visit) const {
#pragma unroll 4
    for (int pass = 0; pass < kBlockKeys / kRowsAtOnce; ++pass) {
      visit(row_of_pass(pass), slot_of_pass(pass));
    }
  }

  __device__ __forceinline__ static void store_chunk(std::uint32_t to, const uint4& chunk) {
    store_16(to, chunk.x, chunk.y, chunk.z, chunk.w);
  }

  static constexpr int kRowsAtOnce = kWarps * 32 / kTileChunks;

  const ForwardParams<float>& params_;
  const Sequence& sequence_;
  Memory& memory_;
  const std::int64_t kv_head_;
  const int first_value_;
  const int key_tiles_;
  const int lane_;
  const bool looks_up_;  // rows by slots, else consecutive and aligned
  std::int64_t slots_[2] = {-1, -1};
  std::int64_t next_slots_[2] = {-1, -1};
  // The next tile to copy.
  int block_ = 0;
  int end_ = 0;
  int part_ = 0;
  int issued_ = 0;
  int used_ = 0;  // negative: tiles to start before the first is waited for
};

}  // namespace ladon::cuda
