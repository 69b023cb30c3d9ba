// Attention forward on tensor cores, for q, k and v of one 16-bit dtype, and for int8 and fp8
// caches.
//
// A block of kWarps warps computes 16 * kWarps query rows of one KV head (rows of all its query
// heads, token-major) over key blocks of 64; a warp owns 16 rows, or they share them (kShared):
//   S = Q K^T (16 x 64), scores to weights P in registers, O += P V (16 x 128).
// Heads and values up to 128 keep Q in registers; longer ones, and calls with rules (kAll), keep it
// in shared memory (kStreamed) and sum S over tiles of 128 columns. Values beyond 128 columns are
// another block's, which computes the same weights again. One warp serves up to 16 rows (decoding),
// four serve the rest; every row's arithmetic is the same in both.
//
// A single warp waits for the latency of each instruction. Where there are too few blocks to hide
// that, two warps share the rows: each multiplies half of the keys, both weigh all scores, and each
// sums half of the columns of V. On an H200 a sequence of 8192 tokens and 8 KV heads takes 27 us
// so, 34 us by one warp.
//
// At head_dim 128 a block of keys is 128 products of m16n8k16 a warp, and 32 KiB of shared-memory
// reads: both take about 256 cycles of a multiprocessor, so half of mma.sync's peak is the limit.
// Decoding is limited by memory: 32 KiB in flight for each of four blocks a multiprocessor. What
// segments leave apart is written and read again, so with many sequences one warp computes several
// segments, from the first on, and folds them (kChains, up to 8 rows). H200, 64 sequences of 8192
// tokens, 64 query and 8 KV heads: 510 us, 4.2 TB/s, instead of 553 with the folding apart.
//
// A masked key has weight 0, but 0 * NaN is NaN. Segments whose sums come out infinite or NaN are
// computed once more with care: infinities and NaN are taken out of V and added for those rows
// alone that see them.
#pragma once

#include <cstdint>

#include "cuda/kernels/forward.cuh"
#include "cuda/kernels/forward_launch.h"
#include "cuda/kernels/forward_scores.cuh"
#include "cuda/kernels/forward_sums.cuh"
#include "cuda/kernels/tensor_core.cuh"
#include "cuda/kernels/tile_stream.cuh"

namespace ladon::cuda {

inline constexpr int kQuerySteps = kTileColumns / 16;  // products over one tile of K

constexpr TileElements tile_elements(ForwardRules rules) {
  switch (rules) {
    case ForwardRules::kWindow: return TileElements::kHalves;
    case ForwardRules::kAll: break;
  }
  return TileElements::kConverted;
}

/// kShared: the warps share 16 rows, else each has its own. kChains: at most 8 rows, over several
/// segments.
template <class Half, int kWarps, bool kStreamed, ForwardRules kRules, bool kShared,
          bool kChains = false>
struct ForwardMemory {
  using Kept = std::conditional_t<kChains, float2, float4>;  // of a thread's rows
  static constexpr int kQueryBytes = (kShared ? 16 : kWarps * 16) * kTileRowBytes;  // of a tile
  using Stream = TileStream<Half, kWarps, tile_elements(kRules)>;
  typename Stream::Memory stream;
  typename Stream::Offsets offsets[kWarps];
  // The scores of all warps where they share rows. Else sums of earlier segments; those of 16 rows
  // are computed apart.
  Kept exchanged[kShared                   ? kKeyGroups * 32
                 : kWarps == 1 && !kChains ? 1
                                           : kValueGroups * kWarps * 32];
  // Followed by the query tiles where they are kept here.

  __device__ __forceinline__ unsigned char* query_tile(int part) {
    if constexpr (kStreamed) {
      return reinterpret_cast<unsigned char*>(this + 1) + part * kQueryBytes;
    } else {
      return stream.tiles[0];
    }
  }
};

template <class Half, int kWarps, bool kStreamed, ForwardRules kRules, bool kShared = false,
          bool kChains = false>
class ForwardTile {
  static constexpr int kSumGroups = kShared ? kValueGroups / kWarps : kValueGroups;

 public:
  using Memory = ForwardMemory<Half, kWarps, kStreamed, kRules, kShared, kChains>;
  static constexpr int kRows = kShared ? 16 : 16 * kWarps;

  __device__ __forceinline__ ForwardTile(const ForwardParams<float>& params,
                                         const ForwardTask& task, const Sequence& sequence,
                                         Memory& memory)
      : params_(params),
        call_(params.call),
        task_(task),
        sequence_(sequence),
        memory_(memory),
        rows_(static_cast<int>(sequence.query_len * params.call.group)),
        first_row_(static_cast<int>(task.row_tile) * kRows),
        lane_(static_cast<int>(threadIdx.x) % 32),
        warp_(static_cast<int>(threadIdx.x) / 32),
        stream_(params, sequence, task, memory.stream, memory.offsets[warp_]),
        heads_{static_cast<int>(task.kv_head * params.call.group),
               static_cast<int>(params.call.group)},
        scores_(params, sequence, heads_, row_of(0), rows_),
        sums_(stream_.value_columns(), kShared ? warp_ * kSumGroups : 0) {}

  __device__ __forceinline__ void run() {
    if (first_row_ >= rows_) return;
    const int last_row = min(rows_, first_row_ + kRows) - 1;
    BlockRange blocks =
        visible_blocks(call_.rules, sequence_, first_row_ / call_.group, last_row / call_.group);
    if (is_partial()) {
      blocks =
          blocks_in_segment(segment_size(), sequence_, blocks, task_.segment, task_.num_segments);
      if (blocks.begin == blocks.end) return;
    }
    load_queries();
    stream_.start(blocks);
    for (int block = blocks.begin; block < blocks.end;) {
      const int end = min(segment_size().end_after(block), blocks.end);
      for (bool careful = false; !run_segment(block, end, careful) && !careful; careful = true) {
        stream_.start({block, blocks.end});
      }
      if constexpr (kRows > 16 || kChains) {
        if (kChains || !is_partial()) fold_segment(end == blocks.end);
      }
      if (is_partial() && !kChains) {
        store_partial(segment_);
      } else if constexpr (kRows == 16 && !kChains) {
        total_[0] = segment_[0];
        total_[1] = segment_[1];
      }
      block = end;
    }
    if (!is_partial()) {
      store_rows();
    } else if constexpr (kChains) {
      store_partial(total_);
    }
  }

 private:
  __device__ __forceinline__ bool is_partial() const { return params_.partials.maximum != nullptr; }

  __device__ __forceinline__ SegmentSize segment_size() const {
    // A constant where heads are short.
    return kStreamed ? params_.segment_size : short_segments();
  }

  /// The thread's two rows.
  __device__ __forceinline__ int row_of(int i) const {
    return first_row_ + (kShared ? 0 : warp_ * 16) + lane_ / 4 + i * 8;
  }

  /// Into shared memory, and from there, where they fit, into registers as operands of products.
  __device__ __forceinline__ void load_queries() {
    const int chunk = static_cast<int>(threadIdx.x) % kTileChunks;
    for (int part = 0; part < stream_.key_tiles(); ++part) {
      const int present = min(kChunkElements, stream_.key_columns(part) - chunk * kChunkElements);
      for (int row = static_cast<int>(threadIdx.x) / kTileChunks; row < kRows;
           row += kWarps * 32 / kTileChunks) {
        uint4 eight = make_uint4(0, 0, 0, 0);
        if (first_row_ + row < rows_ && present > 0) {
          const Half* from =
              query_row(first_row_ + row) + part * kTileColumns + chunk * kChunkElements;
          eight = params_.aligned_q ? *reinterpret_cast<const uint4*>(from)
                                    : load_eight<Half>(from, present);
        }
        unsigned char* const tile = memory_.query_tile(part);
        if (stream_.scaled()) {
          store_product_order(shared_address(tile) + chunk_offset(row, chunk & ~1) + chunk % 2 * 8,
                              eight);
        } else {
          *reinterpret_cast<uint4*>(tile + chunk_offset(row, chunk)) = eight;
        }
      }
    }
    synchronize_warps<kWarps>();
    if constexpr (!kStreamed) {
#pragma unroll
      for (int step = 0; step < kQuerySteps; ++step) load_query(queries_[step], 0, step);
    }
  }

  __device__ __forceinline__ const Half* query_row(int row) const {
    const auto [token, head] = heads_.query_of(row);
    return static_cast<const Half*>(call_.q.data) + sequence_.q + token * call_.q.token_stride +
           head * call_.q.head_stride;
  }

  /// From registers or from shared memory.
  __device__ __forceinline__ void get_query(unsigned (&to)[4], int part, int step) {
    if constexpr (kStreamed) {
      load_query(to, part, step);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) to[i] = queries_[step][i];
    }
  }
  __device__ __forceinline__ void load_query(unsigned (&to)[4], int part, int step) {
    const int row = (kShared ? 0 : warp_ * 16) + lane_ % 16;
    load_matrices(
        to, shared_address(memory_.query_tile(part)) + chunk_offset(row, step * 2 + lane_ / 16));
  }

  /// One segment from nothing. Returns whether all its sums are finite.
  __device__ __forceinline__ bool run_segment(int block, int end, bool careful) {
    segment_[0] = {};
    segment_[1] = {};
    sums_.clear();
    for (; block < end; ++block) {
      float scores[kKeyGroups][4] = {};
      const int key_tiles = stream_.key_tiles();
      for (int part = 0; part <= key_tiles;) {
        const int buffer = stream_.next();
        if (buffer < 0) continue;
        unsigned char* const tile = memory_.stream.tiles[buffer];
        const float* const scales = memory_.stream.scales[buffer];
        if (part < key_tiles) multiply_keys(scores, part, tile);
        if (part == key_tiles - 1) {
          scores_.apply_rules(scores, block, scales);
          sums_.rescale(kRules != ForwardRules::kWindow || careful
                            ? scores_.template weigh<true>(scores, segment_)
                            : scores_.template weigh<false>(scores, segment_));
        }
        if (part == key_tiles) {
          scores_.scale_weights(scores, block, scales);
          multiply_values(scores, tile, careful);
        }
        ++part;
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) segment_[i] = row_sum(segment_[i]);
    const bool is_finite = sums_.are_finite();
    if constexpr (kWarps == 1) return __all_sync(0xffffffffU, is_finite);
    return __syncthreads_and(is_finite);
  }

  /// Tiles of up to 64 columns have half as many steps. Not more exactly than that: a branch after
  /// each step would keep the loads of the next from running ahead.
  __device__ __forceinline__ void multiply_keys(float (&scores)[kKeyGroups][4], int part,
                                                const unsigned char* tile) {
    if (stream_.key_columns(part) > kTileColumns / 2) {
      multiply_keys<kQuerySteps>(scores, part, tile);
    } else {
      multiply_keys<kQuerySteps / 2>(scores, part, tile);
    }
  }
  template <int kSteps>
  __device__ __forceinline__ void multiply_keys(float (&scores)[kKeyGroups][4], int part,
                                                const unsigned char* tile) {
    if constexpr (kShared) {
      // Each warp has some of the keys, and all warps need all scores.
      constexpr int kOwnGroups = kKeyGroups / kWarps;
      float own[kOwnGroups][4] = {};
      add_products<kSteps>(own, part, tile + warp_ * kOwnGroups * 8 * kTileRowBytes);
#pragma unroll
      for (int n = 0; n < kOwnGroups; ++n) {
        memory_.exchanged[(warp_ * kOwnGroups + n) * 32 + lane_] =
            make_float4(own[n][0], own[n][1], own[n][2], own[n][3]);
      }
      __syncthreads();
#pragma unroll
      for (int n = 0; n < kKeyGroups; ++n) {
        const float4 four = memory_.exchanged[n * 32 + lane_];
        scores[n][0] = four.x;
        scores[n][1] = four.y;
        scores[n][2] = four.z;
        scores[n][3] = four.w;
      }
    } else {
      add_products<kSteps>(scores, part, tile);
    }
  }

  /// Adds the products of queries with groups of 8 keys, the first of which is the tile's.
  template <int kSteps, int kGroups>
  __device__ __forceinline__ void add_products(float (&scores)[kGroups][4], int part,
                                               const unsigned char* tile) {
    // Chunk 2 i further right is at offset ^ (i << 5).
    const unsigned offset = fresh(chunk_offset(lane_ % 8 + lane_ / 16 * 8, lane_ / 8 % 2));
    const unsigned keys = shared_address(tile);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      unsigned query[4];
      get_query(query, part, step);
#pragma unroll
      for (int pair = 0; pair < kGroups / 2; ++pair) {
        unsigned key[4];
        load_matrices(key, keys + pair * 16 * kTileRowBytes + (offset ^ (step << 5)));
        multiply_add<Half>(scores[pair * 2], query, key[0], key[1]);
        multiply_add<Half>(scores[pair * 2 + 1], query, key[2], key[3]);
      }
    }
  }
  __device__ __forceinline__ void multiply_values(const float (&weights)[kKeyGroups][4],
                                                  unsigned char* tile, bool careful) {
    if (stream_.scaled()) return sums_.add_scaled(weights, tile);
    if (careful) {
      sums_.add_non_finite(scores_.masked(), tile);
      synchronize_warps<kWarps>();
      clear_non_finite<Half, kWarps * 32>(tile);
      synchronize_warps<kWarps>();
    }
    sums_.add(weights, tile);
  }

  __device__ __forceinline__ void fold_segment(bool is_last) {
    const Base2Exp exp_of{params_.factor};
    const Fold<float> folds[2] = {{total_[0], segment_[0], exp_of},
                                  {total_[1], segment_[1], exp_of}};
    total_[0] = folds[0].state;
    total_[1] = folds[1].state;
    sums_.fold(folds, memory_.exchanged + threadIdx.x, kWarps * 32, has_earlier_, is_last);
    has_earlier_ = true;
  }

  __device__ __forceinline__ void store_partial(const RowState<float> (&states)[2]) const {
    const Partials<float>& partials = params_.partials;
    const std::int64_t place = task_.sequence * call_.num_kv_heads + task_.kv_head;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (row_of(i) >= rows_) continue;
      const std::int64_t last = task_.segment + task_.num_segments - 1;
      const std::int64_t index = partials.index(place, last, row_of(i));
      if (lane_ % 4 == 0 && first_column() == 0) {
        partials.maximum[index] = states[i].maximum;
        partials.sum[index] = states[i].sum;
      }
      sums_.store_partial(i, partials.out + index * call_.value_dim + first_column());
    }
  }

  __device__ __forceinline__ void store_rows() const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      store_row(params_, sequence_, {i, heads_.query_of(row_of(i)), row_of(i) < rows_}, total_[i],
                sums_, first_column());
    }
  }

  /// The first column of V of which this warp has sums.
  __device__ __forceinline__ int first_column() const {
    return stream_.first_value() + (kShared ? warp_ * kSumGroups * 8 : 0);
  }

  const ForwardParams<float>& params_;
  const AttentionParams& call_;
  const ForwardTask& task_;
  const Sequence& sequence_;
  Memory& memory_;
  const int rows_;
  const int first_row_;
  const int lane_;
  const int warp_;
  typename Memory::Stream stream_;
  const RowHeads heads_;
  ForwardScores<Half, kRules> scores_;
  ForwardSums<Half, kSumGroups> sums_;
  unsigned queries_[kStreamed ? 1 : kQuerySteps][4];
  RowState<float> segment_[2];
  RowState<float> total_[2];
  bool has_earlier_ = false;
};

}  // namespace ladon::cuda
