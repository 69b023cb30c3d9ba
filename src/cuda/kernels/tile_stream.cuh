// TileStream: keys and values of one KV head as a stream of 64 x 128 tiles in shared memory, a
// few tiles ahead of their use.
//
// For each block of keys come the tiles of K, 128 columns each, then the tile of V with the columns
// that this block of threads computes. Rows that do not exist and columns past the end are zeros:
// what is in memory there is not read. 16-byte rows are copied asynchronously; unaligned rows, and
// int8 and fp8 rows, which become 16-bit elements on the way, go through registers.
//
// A tile's rows are kTileColumns elements. The 16-byte chunks of a row are permuted by the row's
// last three bits, so that the eight rows of an 8x8 matrix are in different banks.
//
// Rows of caches are found by their slots (pages, rings). Each lane finds those of two rows and
// leaves the rows' offsets in shared memory for the lanes that copy them: with a shuffle, a product
// and tests for every chunk, and a wait for the page table, paged caches were read at half speed.
#pragma once

#include <cstdint>

#include "cuda/kernels/forward.cuh"
#include "cuda/kernels/tensor_core.cuh"
#include "cuda/kernels/tile_elements.cuh"

namespace ladon::cuda {

inline constexpr int kTileColumns = 128;
inline constexpr int kTileChunks = kTileColumns / kChunkElements;  // of one row
inline constexpr int kTileRowBytes = kTileColumns * 2;
inline constexpr int kTileBytes = kBlockKeys * kTileRowBytes;
/// What the tiles of a stream hold: 16-bit elements as they are in memory; those, or quantised ones
/// converted to them.
enum class TileElements : std::uint8_t { kHalves, kConverted };
/// Buffers of a stream. Fewer where more blocks fit a multiprocessor for it.
constexpr int tile_buffers(int warps, TileElements elements) {
  return warps == 1 || elements != TileElements::kHalves ? 3 : 4;
}

/// The byte offset of a chunk in a tile of 16-bit elements.
__device__ inline std::uint32_t chunk_offset(int row, int chunk) {
  return static_cast<std::uint32_t>(row * kTileRowBytes + ((chunk ^ (row & 7)) * 16));
}

template <class Half, int kWarps, TileElements kElements>
class TileStream {
  static constexpr int kTileBuffers = tile_buffers(kWarps, kElements);
  static constexpr int kTilesAhead = kTileBuffers - 1;
  static constexpr int kBytes = sizeof(Half);
  // A thread copies one chunk of so many consecutive rows.
  static constexpr int kRowsPerThread = kBlockKeys * kTileChunks / (kWarps * 32);
  static_assert(kRowsPerThread % 8 == 0);
  // A warp copies these rows, and finds them.
  static constexpr int kRowsPerWarp = kBlockKeys / kWarps;
  static constexpr int kRowsPerLane = (kRowsPerWarp + 31) / 32;
  static constexpr std::int64_t kNoRow = INT64_MIN;
  // Rows that a thread converts together: each load waits for memory.
  static constexpr int kConvertedAtOnce = 8;

 public:
  struct Memory {
    alignas(128) unsigned char tiles[kTileBuffers][kBlockKeys * kTileRowBytes];
    float scales[kTileBuffers][kBlockKeys];  // of quantised rows
    // What is needed of the Sequence: global memory would be read again after each copy.
    struct {
      std::int64_t kv_len;
      std::int64_t key_origin;
      const std::int32_t* pages;
      std::int64_t first_slot;
      std::int64_t ring_start;
      std::int64_t k;
      std::int64_t v;
    } sequence;
  };
  /// Of the rows that a warp copies, in bytes; or kNoRow. Used by next() alone.
  struct alignas(16) Offsets {
    std::int64_t rows[kRowsPerWarp];
  };

  __device__ __forceinline__ TileStream(const ForwardParams<float>& params,
                                        const Sequence& sequence, const ForwardTask& task,
                                        Memory& memory, Offsets& offsets)
      : params_(params),
        memory_(memory),
        offsets_(offsets),
        kv_head_(task.kv_head),
        first_value_(static_cast<int>(task.value_chunk) * kTileColumns),
        key_tiles_(static_cast<int>((params.call.head_dim + kTileColumns - 1) / kTileColumns)),
        looks_up_(params.call.kv_layout.page_size != 0 || params.call.kv_layout.ring_slots != 0 ||
                  params.call.kv_layout.k_scales != nullptr || !params.aligned_k ||
                  !params.aligned_v) {
    if (threadIdx.x != 0) return;
    // start() synchronizes.
    memory.sequence = {sequence.kv_len,     sequence.key_origin, sequence.pages,
                       sequence.first_slot, sequence.ring_start, sequence.k,
                       sequence.v};
  }

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
    return kElements != TileElements::kHalves && params_.call.kv_layout.k_scales != nullptr;
  }

  /// Starts, or starts again, at the first tile of a block.
  __device__ __forceinline__ void start(const BlockRange& blocks) {
    wait_for_copies<0>();
    synchronize_warps<kWarps>();
    block_ = blocks.begin;
    end_ = blocks.end;
    if (looks_up_) request_pages(block_);
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
      if (part_ == 0 && looks_up_) {
        find_slots();
        request_pages(block_ + 1);
      }
      copy_tile(part_ < key_tiles_);
      ++issued_;
      if (++part_ > key_tiles_) {
        part_ = 0;
        ++block_;
      }
    }
    commit_copies();
    __syncwarp();  // offsets_ have been read
  }

  __device__ __forceinline__ std::int64_t first_key(int block) const {
    return static_cast<std::int64_t>(block) * kBlockKeys - memory_.sequence.key_origin;
  }
  /// Calls visit(i, row) for the rows that this lane finds.
  template <class Visit>
  __device__ __forceinline__ static void for_found_rows(const Visit& visit) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int first = static_cast<int>(threadIdx.x) / 32 * kRowsPerWarp + lane;
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
      if (lane < kRowsPerWarp) visit(i, first + i * 32);
    }
  }

  /// Reads what the page table says of a block. A block ahead of its copies: the table is in memory
  /// far away, so nothing is computed from it before that.
  __device__ __forceinline__ void request_pages(int block) {
    if (params_.call.kv_layout.page_size == 0 || block >= end_) return;
    const int size = static_cast<int>(params_.call.kv_layout.page_size);
    const std::int64_t first = first_key(block);
    for_found_rows([&](int i, int row) {
      const std::int64_t key = first + row;
      if (key < 0 || key >= memory_.sequence.kv_len) return;
      const int page = static_cast<int>(key) / size;
      slot_in_page_[i] = static_cast<int>(key) - page * size;
      pages_[i] = memory_.sequence.pages[page];
    });
  }

  /// The slots of the current block's keys; -1 where there is none.
  __device__ __forceinline__ void find_slots() {
    const KvLayout& layout = params_.call.kv_layout;
    const std::int64_t first = first_key(block_);
    for_found_rows([&](int i, int row) {
      const std::int64_t key = first + row;
      if (key < 0 || key >= memory_.sequence.kv_len) {
        slots_[i] = -1;
      } else if (layout.page_size != 0) {
        slots_[i] = pages_[i] * layout.page_size + slot_in_page_[i];
      } else if (layout.ring_slots == 0) {
        slots_[i] = memory_.sequence.first_slot + key;
      } else {
        const std::int64_t place = memory_.sequence.ring_start + key;
        slots_[i] = memory_.sequence.first_slot +
                    (place >= layout.ring_slots ? place - layout.ring_slots : place);
      }
    });
  }

  /// Leaves the rows' offsets to those lanes that copy them, all of this warp.
  __device__ __forceinline__ void share_offsets(const Operand& operand, std::int64_t bytes) {
    __syncwarp();
    for_found_rows([&](int i, int row) {
      offsets_.rows[row % kRowsPerWarp] =
          slots_[i] < 0 ? kNoRow : slots_[i] * operand.token_stride * bytes;
    });
    __syncwarp();
  }

  /// The first of the consecutive rows of which this thread copies a chunk.
  __device__ __forceinline__ static int first_row() {
    return static_cast<int>(threadIdx.x) / kTileChunks * kRowsPerThread;
  }
  /// Calls visit(to, offset) for each of them: where the chunk goes, and where its row is. Offsets
  /// are read eight at a time, because no load is moved across a copy.
  template <class Visit>
  __device__ __forceinline__ void for_each_row(unsigned tile, int chunk, const Visit& visit) const {
    const auto* offsets =
        reinterpret_cast<const longlong2*>(offsets_.rows + first_row() % kRowsPerWarp);
    tile = fresh(tile + first_row() * kTileRowBytes);
    chunk = static_cast<int>(fresh(chunk));
#pragma unroll 1
    for (int eight = 0; eight < kRowsPerThread;
         eight += 8, offsets += 4, tile += 8 * kTileRowBytes) {
      longlong2 pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = offsets[i];
#pragma unroll
      for (int row = 0; row < 8; ++row) {
        visit(tile + row * kTileRowBytes + (chunk ^ row) * 16,
              row % 2 == 0 ? pairs[row / 2].x : pairs[row / 2].y);
      }
    }
  }

  __device__ __forceinline__ void copy_tile(bool keys) {
    const AttentionParams& call = params_.call;
    const Operand& operand = keys ? call.k : call.v;
    const int columns = keys ? key_columns(part_) : value_columns();
    const int chunk = static_cast<int>(threadIdx.x) % kTileChunks;
    constexpr int kPerChunk = 16 / kBytes;
    const std::int64_t start = (keys ? memory_.sequence.k : memory_.sequence.v) +
                               kv_head_ * operand.head_stride +
                               (keys ? part_ * kTileColumns : first_value_);
    const int buffer = issued_ % kTileBuffers;
    const unsigned tile = shared_address(memory_.tiles[buffer]);
    if constexpr (kElements != TileElements::kHalves) {
      if (scaled()) copy_scales(keys ? call.kv_layout.k_scales : call.kv_layout.v_scales, buffer);
    }
    if constexpr (kElements == TileElements::kConverted) {
      if (scaled()) return copy_converted(operand, start, tile, keys, columns);
    }
    if (looks_up_) share_offsets(operand, kBytes);
    // Products read half a tile or all of it.
    if (chunk >= kTileChunks / 2 && columns <= kTileColumns / 2) return;
    const int present = max(0, min(kPerChunk, columns - chunk * kPerChunk));
    const auto* const data =
        static_cast<const char*>(operand.data) + (start + chunk * kPerChunk) * kBytes;
    if (!looks_up_) return copy_consecutive(operand, data, tile, present);
    if (!(keys ? params_.aligned_k : params_.aligned_v)) {
#pragma unroll 4
      for (int row = first_row(); row < first_row() + kRowsPerThread; ++row) {
        const std::int64_t offset = offsets_.rows[row % kRowsPerWarp];
        const int count = offset == kNoRow ? 0 : present;
        const char* from = data + (count == 0 ? 0 : offset);
        store_chunk(tile + chunk_offset(row, chunk),
                    load_eight<Half>(reinterpret_cast<const Half*>(from), count));
      }
      return;
    }
    // Most blocks are whole, and need no test of each row.
    if (is_whole(block_) && columns % (kTileColumns / 2) == 0) {
      for_each_row(tile, chunk,
                   [&](unsigned to, std::int64_t offset) { copy_row(to, data + offset, 16); });
    } else {
      for_each_row(tile, chunk, [&](unsigned to, std::int64_t offset) {
        const int count = offset == kNoRow ? 0 : present;
        copy_row(to, count == 0 ? operand.data : data + offset, count * kBytes);
      });
    }
  }

  /// A chunk of a row. With few rows a head is read once, else other blocks of threads read it too.
  __device__ __forceinline__ static void copy_row(unsigned to, const void* from, int bytes) {
    kWarps <= 2 ? copy_async_16_once(to, from, bytes) : copy_async_16(to, from, bytes);
  }

  /// Whether all keys of a block exist.
  __device__ __forceinline__ bool is_whole(int block) const {
    const std::int64_t first = first_key(block);
    return first >= 0 && first + kBlockKeys <= memory_.sequence.kv_len;
  }

  /// Aligned 16-bit rows that follow each other.
  __device__ __forceinline__ void copy_consecutive(const Operand& operand, const char* data,
                                                   unsigned tile, int present) {
    // Threads of a warp copy neighbouring rows.
    constexpr int kRowsAtOnce = kWarps * 32 / kTileChunks;
    const int chunk = static_cast<int>(threadIdx.x) % kTileChunks;
    const int thread_row = static_cast<int>(threadIdx.x) / kTileChunks;
    const std::int64_t first = first_key(block_);
    const std::int64_t row_bytes = operand.token_stride * kBytes;
    const char* const rows = data + (memory_.sequence.first_slot + first + thread_row) * row_bytes;
    const auto copy_rows = [&](const auto& elements_of) {
      const char* from = rows;
#pragma unroll 4
      for (int pass = 0; pass < kBlockKeys / kRowsAtOnce; ++pass, from += kRowsAtOnce * row_bytes) {
        const int row = pass * kRowsAtOnce + thread_row;
        const int count = elements_of(row);
        copy_row(tile + chunk_offset(row, chunk), count == 0 ? operand.data : from, count * kBytes);
      }
    };
    if (is_whole(block_)) {
      copy_rows([&](int) { return present; });
    } else {
      const std::int64_t kv_len = memory_.sequence.kv_len;
      copy_rows([&](int row) { return first + row >= 0 && first + row < kv_len ? present : 0; });
    }
  }

  __device__ __forceinline__ void copy_scales(const float* scales, int buffer) {
    const KvLayout& layout = params_.call.kv_layout;
    for_found_rows([&](int i, int row) {
      const bool exists = slots_[i] >= 0;
      copy_async_4(shared_address(&memory_.scales[buffer][row]),
                   exists ? scales + slots_[i] * layout.scale_slot_stride +
                                kv_head_ * layout.scale_head_stride
                          : scales,
                   exists ? 4 : 0);
    });
  }

  /// int8 and fp8 become 16-bit elements, through registers.
  __device__ __forceinline__ void copy_converted(const Operand& operand, std::int64_t start,
                                                 unsigned tile, bool keys, int columns) {
    const int chunk = static_cast<int>(threadIdx.x) % kTileChunks;
    const int present = max(0, min(kChunkElements, columns - chunk * kChunkElements));
    const bool aligned = keys ? params_.aligned_k : params_.aligned_v;
    const auto* const data =
        static_cast<const unsigned char*>(operand.data) + start + chunk * kChunkElements;
    const std::int64_t* const offsets = offsets_.rows + first_row() % kRowsPerWarp;
    share_offsets(operand, 1);
    const auto copy_rows = [&](const auto& store) {
#pragma unroll 1
      for (int first = 0; first < kRowsPerThread; first += kConvertedAtOnce) {
        uint2 codes[kConvertedAtOnce];
#pragma unroll
        for (int i = 0; i < kConvertedAtOnce; ++i) {
          const std::int64_t offset = offsets[first + i];
          const int count = offset == kNoRow ? 0 : present;
          codes[i] = load_codes(data + (count == 0 ? 0 : offset), count, aligned);
        }
#pragma unroll
        for (int i = 0; i < kConvertedAtOnce; ++i) store(first_row() + first + i, codes[i]);
      }
    };
    const auto copy_as = [&](auto stored) {
      // Values are bf16 whatever the queries are: products with their scales need its range.
      if (keys) {
        const int pair = static_cast<int>(fresh(chunk & ~1));
        const unsigned half = chunk % 2 * 8;
        copy_rows([&](int row, uint2 codes) {
          store_product_order(tile + chunk_offset(row, pair) + half,
                              convert_eight<Half, stored.kDType>(codes));
        });
      } else {
        copy_rows([&](int row, uint2 codes) {
          store_chunk(tile + chunk_offset(row, chunk),
                      convert_eight<__nv_bfloat16, stored.kDType>(codes));
        });
      }
    };
    with_quantised_type(operand.dtype, copy_as);
  }

  __device__ __forceinline__ static void store_chunk(std::uint32_t to, const uint4& chunk) {
    store_16(to, chunk.x, chunk.y, chunk.z, chunk.w);
  }

  const ForwardParams<float>& params_;
  Memory& memory_;
  Offsets& offsets_;
  const std::int64_t kv_head_;
  const int first_value_;
  const int key_tiles_;
  const bool looks_up_;  // rows by slots, else consecutive and aligned
  // Of the rows that this lane finds: slots in the current block, pages in the next.
  std::int64_t slots_[kRowsPerLane];
  std::int32_t pages_[kRowsPerLane];
  int slot_in_page_[kRowsPerLane];
  // The next tile to copy.
  int block_ = 0;
  int end_ = 0;
  int part_ = 0;
  int issued_ = 0;
  int used_ = 0;  // negative: tiles to start before the first is waited for
};

}  // namespace ladon::cuda
