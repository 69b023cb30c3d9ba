// Attention forward on tensor cores, for q, k and v of one 16-bit dtype, and for int8 caches.
//
// A block of kWarps warps computes 16 * kWarps query rows of one KV head (rows of all its query
// heads, token-major) over key blocks of 64; a warp owns 16 rows:
//   S = Q K^T (16 x 64), scores to weights P in registers, O += P V (16 x 128).
// Heads up to 128 keep Q in registers; longer ones (kStreamed) keep it in shared memory and sum S
// over tiles of 128 columns. Values beyond 128 columns are another block's, which computes the same
// weights again. One warp serves up to 16 rows (decoding), four serve the rest; every row's
// arithmetic is the same in both.
//
// At head_dim 128 a block of keys is 128 products of m16n8k16 a warp, and 32 KiB of shared-memory
// reads: both take about 256 cycles of a multiprocessor, so half of mma.sync's peak is the limit.
// Decoding is limited by memory: 32 KiB in flight for each of four blocks a multiprocessor.
//
// A masked key has weight 0, but 0 * NaN is NaN. Sums that come out infinite or NaN are computed
// once more with care: infinite and NaN values are taken out of V and added for those rows alone
// that see them.
#pragma once

#include <cfloat>
#include <cstdint>

#include "cuda/kernels/forward.cuh"
#include "cuda/kernels/tensor_core.cuh"
#include "cuda/kernels/tile_stream.cuh"

namespace ladon::cuda {

inline constexpr int kKeyGroups = kBlockKeys / 8;      // products' columns of S
inline constexpr int kValueGroups = kTileColumns / 8;  // and of O
inline constexpr int kQuerySteps = kTileColumns / 16;  // of one tile of K
inline constexpr int kSumsPerThread = kValueGroups * 4;

/// f16 has few exponents: weights are stored times 2^12, so that small ones keep their precision.
template <class Half>
inline constexpr float kWeightShift = std::is_same_v<Half, __half> ? 12.0F : 0.0F;

__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Scores in shared memory, where loops that are not unrolled can reach them: each thread's own.
struct StagedScores {
  float scores[kKeyGroups * 4][32];
};
struct NoStagedScores {};

template <class Half, int kWarps, bool kStreamed, bool kFull>
struct ForwardMemory {
  typename TileStream<Half, kWarps>::Memory stream;
  std::conditional_t<kFull, StagedScores, NoStagedScores> staged[kWarps];
  // Sums of earlier segments. One warp's segments are always computed apart.
  float earlier[kWarps == 1 ? 1 : kSumsPerThread * kWarps * 32];
  // Followed by the query tiles where they are kept here.

  __device__ __forceinline__ unsigned char* query_tile(int part) {
    if constexpr (kStreamed) {
      return reinterpret_cast<unsigned char*>(this + 1) + part * kWarps * 16 * kTileRowBytes;
    } else {
      return stream.tiles[0];
    }
  }
};

template <class Half, int kWarps, bool kStreamed, bool kFull>
class ForwardTile {
 public:
  using Memory = ForwardMemory<Half, kWarps, kStreamed, kFull>;
  static constexpr int kRows = 16 * kWarps;

  __device__ __forceinline__ ForwardTile(const ForwardParams<float>& params,
                                         const ForwardTask& task, const Sequence& sequence,
                                         Memory& memory)
      : params_(params),
        call_(params.call),
        task_(task),
        sequence_(sequence),
        memory_(memory),
        stream_(params, sequence, task, memory.stream),
        rows_(static_cast<int>(sequence.query_len * params.call.group)),
        first_row_(static_cast<int>(task.row_tile) * kRows),
        lane_(static_cast<int>(threadIdx.x) % 32),
        warp_(static_cast<int>(threadIdx.x) / 32) {}

  __device__ __forceinline__ void run() {
    if (first_row_ >= rows_) return;
    const int last_row = min(rows_, first_row_ + kRows) - 1;
    BlockRange blocks = visible_blocks(call_, sequence_, first_row_, last_row);
    if (is_partial()) {
      blocks = blocks_in_segment(sequence_, blocks, task_.segment);
      if (blocks.begin == blocks.end) return;
    }
    find_rows();
    load_queries();
    stream_.start(blocks);
    for (int block = blocks.begin; block < blocks.end;) {
      const int end = min((block / kSegmentBlocks + 1) * kSegmentBlocks, blocks.end);
      for (bool careful = false; !run_segment(block, end, careful) && !careful; careful = true) {
        stream_.start({block, blocks.end});
      }
      if (is_partial()) {
        store_partial();
      } else if constexpr (kWarps > 1) {
        fold_segment(end == blocks.end);
      } else {
        total_[0] = segment_[0];
        total_[1] = segment_[1];
      }
      block = end;
    }
    if (!is_partial()) store_rows();
  }

 private:
  __device__ __forceinline__ bool is_partial() const { return params_.partials.maximum != nullptr; }

  // A thread has two rows: lane / 4 of its warp's 16, and the one 8 below.
  __device__ __forceinline__ int row_in_tile(int i) const { return warp_ * 16 + lane_ / 4 + i * 8; }

  __device__ __forceinline__ void find_rows() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row_ + row_in_tile(i);
      begin_[i] = 0;
      end_[i] = 0;
      if (row >= rows_) continue;
      const int group = static_cast<int>(call_.group);
      token_[i] = row / group;
      head_[i] = static_cast<int>(task_.kv_head) * group + row % group;
      const KeyRange window = window_of(call_.rules, sequence_, token_[i]);
      begin_[i] = static_cast<int>(window.begin);
      end_[i] = static_cast<int>(window.end > window.begin ? window.end : window.begin);
    }
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
        *reinterpret_cast<uint4*>(memory_.query_tile(part) + chunk_offset(row, chunk)) = eight;
      }
    }
    synchronize_warps<kWarps>();
    if constexpr (!kStreamed) {
#pragma unroll
      for (int step = 0; step < kQuerySteps; ++step) load_query(queries_[step], 0, step);
    }
  }

  __device__ __forceinline__ const Half* query_row(int row) const {
    const int group = static_cast<int>(call_.group);
    const std::int64_t token = row / group;
    const std::int64_t head = task_.kv_head * group + row % group;
    return static_cast<const Half*>(call_.q.data) + sequence_.q + token * call_.q.token_stride +
           head * call_.q.head_stride;
  }

  __device__ __forceinline__ void load_query(unsigned (&to)[4], int part, int step) {
    const int row = warp_ * 16 + lane_ % 16;
    load_matrices(
        to, shared_address(memory_.query_tile(part)) + chunk_offset(row, step * 2 + lane_ / 16));
  }

  /// One segment from nothing. Returns whether all its sums are finite.
  __device__ __forceinline__ bool run_segment(int block, int end, bool careful) {
    segment_[0] = {};
    segment_[1] = {};
#pragma unroll
    for (int n = 0; n < kValueGroups; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums_[n][e] = 0;
    }
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
          if constexpr (kFull) apply_rules(scores, block, scales);
          if constexpr (!kFull) apply_window(scores, block);
          weigh(scores);
        }
        if (part == key_tiles) {
          if constexpr (kFull) scale_weights(scores, block, scales);
          multiply_values(scores, tile, careful);
        }
        ++part;
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      segment_[i].sum += __shfl_xor_sync(0xffffffffU, segment_[i].sum, 1);
      segment_[i].sum += __shfl_xor_sync(0xffffffffU, segment_[i].sum, 2);
    }
    bool is_finite = true;
#pragma unroll
    for (int n = 0; n < kValueGroups; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) is_finite = is_finite && fabsf(sums_[n][e]) <= FLT_MAX;
    }
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
    const unsigned keys = shared_address(tile);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      unsigned query[4];
      if constexpr (kStreamed) {
        load_query(query, part, step);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) query[i] = queries_[step][i];
      }
#pragma unroll
      for (int pair = 0; pair < kKeyGroups / 2; ++pair) {
        unsigned key[4];
        const int row = pair * 16 + lane_ % 8 + lane_ / 16 * 8;
        load_matrices(key, keys + chunk_offset(row, step * 2 + lane_ / 8 % 2));
        multiply_add<Half>(scores[pair * 2], query, key[0], key[1]);
        multiply_add<Half>(scores[pair * 2 + 1], query, key[2], key[3]);
      }
    }
  }

  /// The key of a score, counted from the sequence's first that is held.
  __device__ __forceinline__ int first_key(int block) const {
    return static_cast<int>(static_cast<std::int64_t>(block) * kBlockKeys - sequence_.key_origin);
  }
  __device__ __forceinline__ int key_of(int first, int n, int e) const {
    return first + n * 8 + lane_ % 4 * 2 + e % 2;
  }

  __device__ __forceinline__ void apply_window(float (&scores)[kKeyGroups][4], int block) const {
    const int first = first_key(block);
    const int last = first + kBlockKeys - 1;
    if (first >= begin_[0] && first >= begin_[1] && last < end_[0] && last < end_[1]) return;
#pragma unroll
    for (int n = 0; n < kKeyGroups; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int key = key_of(first, n, e);
        if (key < begin_[e / 2] || key >= end_[e / 2]) scores[n][e] = -INFINITY;
      }
    }
  }

  /// Calls change(score, key, row) for each of the thread's scores. By way of shared memory, so
  /// that the rules are compiled once and not for each register.
  template <class Change>
  __device__ __forceinline__ void for_each_score(float (&scores)[kKeyGroups][4], int block,
                                                 const Change& change) {
    auto& staged = memory_.staged[warp_].scores;
    const int first = first_key(block);
#pragma unroll
    for (int i = 0; i < kKeyGroups * 4; ++i) staged[i][lane_] = scores[i / 4][i % 4];
#pragma unroll 1
    for (int i = 0; i < kKeyGroups * 4; ++i) {
      const bool lower = i % 4 >= 2;
      staged[i][lane_] = change(staged[i][lane_], key_of(first, i / 4, i % 4), lower ? 1 : 0);
    }
#pragma unroll
    for (int i = 0; i < kKeyGroups * 4; ++i) scores[i / 4][i % 4] = staged[i][lane_];
  }

  __device__ __forceinline__ void apply_rules(float (&scores)[kKeyGroups][4], int block,
                                              const float* key_scales) {
    const int first = first_key(block);
    if (params_.only_scales) return apply_scales(scores, first, key_scales);
    for_each_score(scores, block, [&](float dot, int key, int row) {
      const int begin = row == 0 ? begin_[0] : begin_[1];
      const int end = row == 0 ? end_[0] : end_[1];
      if (key < begin || key >= end) return -INFINITY;
      if (stream_.scaled()) dot *= key_scales[key - first];
      return masked_score(
          call_.rules, sequence_, query_of(row), key,
          softcapped(call_.rules, dot * static_cast<float>(call_.rules.scale)).score);
    });
  }
  /// An int8 cache without other rules than a window.
  __device__ __forceinline__ void apply_scales(float (&scores)[kKeyGroups][4], int first,
                                               const float* key_scales) {
    const float scale = static_cast<float>(call_.rules.scale);
#pragma unroll
    for (int n = 0; n < kKeyGroups; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int key = key_of(first, n, e);
        const bool is_seen = key >= begin_[e / 2] && key < end_[e / 2];
        scores[n][e] = is_seen ? scores[n][e] * key_scales[key - first] * scale : -INFINITY;
      }
    }
  }
  /// Without an index into registers.
  __device__ __forceinline__ QueryRow query_of(int row) const {
    return {row == 0 ? token_[0] : token_[1], row == 0 ? head_[0] : head_[1]};
  }

  /// Turns scores into weights, and rescales what was summed so far where a maximum has grown.
  __device__ __forceinline__ void weigh(float (&scores)[kKeyGroups][4]) {
    float base[2];
    float rescale[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float largest = segment_[i].maximum;
#pragma unroll
      for (int n = 0; n < kKeyGroups; ++n) {
        largest = fmaxf(largest, fmaxf(scores[n][i * 2], scores[n][i * 2 + 1]));
      }
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffU, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffU, largest, 2));
      base[i] = largest == -INFINITY ? 0.0F : largest;
      rescale[i] = largest == segment_[i].maximum
                       ? 1.0F
                       : exp2_approximate((segment_[i].maximum - base[i]) * params_.factor);
      segment_[i].maximum = largest;
      segment_[i].sum *= rescale[i];
    }
    if (__any_sync(0xffffffffU, rescale[0] != 1 || rescale[1] != 1)) {
#pragma unroll
      for (int n = 0; n < kValueGroups; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums_[n][e] *= rescale[e / 2];
      }
    }
    masked_ = 0;
#pragma unroll
    for (int n = 0; n < kKeyGroups; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (scores[n][e] == -INFINITY) masked_ |= 1U << (n * 4 + e);
        scores[n][e] =
            exp2_approximate(fmaf(scores[n][e] - base[e / 2], params_.factor, kWeightShift<Half>));
        segment_[e / 2].sum += scores[n][e];
      }
    }
  }

  /// Dropout, and the scales of int8 values. A scale may be NaN, and masked keys must not bring it
  /// in.
  __device__ __forceinline__ void scale_weights(float (&weights)[kKeyGroups][4], int block,
                                                const float* value_scales) {
    if (!call_.rules.dropout && !stream_.scaled()) return;
    const int first = first_key(block);
    if (!call_.rules.dropout) {
#pragma unroll
      for (int i = 0; i < kKeyGroups * 4; ++i) {
        const float scale = value_scales[key_of(first, i / 4, i % 4) - first];
        weights[i / 4][i % 4] = (masked_ >> i & 1U) != 0 ? 0.0F : weights[i / 4][i % 4] * scale;
      }
      return;
    }
    int i = 0;
    for_each_score(weights, block, [&](float weight, int key, int row) {
      if ((masked_ >> i++ & 1U) != 0) return 0.0F;
      weight *= dropout_factor<float>(call_.rules, sequence_, query_of(row), key);
      return stream_.scaled() ? weight * value_scales[key - first] : weight;
    });
  }

  __device__ __forceinline__ void multiply_values(const float (&weights)[kKeyGroups][4],
                                                  const unsigned char* tile, bool careful) {
    const unsigned values = shared_address(tile);
    if (kFull && stream_.scaled()) {
      // Scaled weights keep 16 bits of precision, as two bf16. Integers are finite.
      for_each_product<__nv_bfloat16>(
          weights, values, [](float(&sums)[4], const auto& weight, int, unsigned b0, unsigned b1) {
            multiply_add<__nv_bfloat16>(sums, weight, b0, b1);
          });
      float rests[kKeyGroups][4];
#pragma unroll
      for (int i = 0; i < kKeyGroups * 4; ++i) {
        const float weight = weights[i / 4][i % 4];
        rests[i / 4][i % 4] = weight - __bfloat162float(__float2bfloat16_rn(weight));
      }
      for_each_product<__nv_bfloat16>(
          rests, values, [](float(&sums)[4], const auto& weight, int, unsigned b0, unsigned b1) {
            multiply_add<__nv_bfloat16>(sums, weight, b0, b1);
          });
    } else if (careful) {
      for_each_product<Half>(
          weights, values,
          [this](float(&sums)[4], const auto& weight, int step, unsigned b0, unsigned b1) {
            const NonFinite low = take_out_non_finite<Half>(b0);
            const NonFinite high = take_out_non_finite<Half>(b1);
            unsigned seen[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) seen[i] = huge_where_seen(step * 8 + i * 2);
            multiply_add<Half>(sums, weight, low.finite, high.finite);
            // Each in a sum of its own, which overflows: tensor cores add before they do.
            float positive[4] = {};
            float negative[4] = {};
            multiply_add<__nv_bfloat16>(positive, seen, low.positive, high.positive);
            multiply_add<__nv_bfloat16>(negative, seen, low.negative, high.negative);
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[i] += positive[i] + negative[i];
          });
    } else {
      for_each_product<Half>(
          weights, values, [](float(&sums)[4], const auto& weight, int, unsigned b0, unsigned b1) {
            multiply_add<Half>(sums, weight, b0, b1);
          });
    }
  }

  /// Scores i and i + 1 as an operand: huge where the row sees the key, else 0.
  __device__ __forceinline__ unsigned huge_where_seen(int i) const {
    return ((masked_ >> i & 1U) == 0 ? NonFinite::kHuge : 0) |
           ((masked_ >> (i + 1) & 1U) == 0 ? NonFinite::kHuge << 16 : 0);
  }

  /// Calls multiply(sums, weights, step, b0, b1) for each 16 x 8 part of O and 16 keys of V, keys
  /// ascending.
  template <class Element, class Multiply>
  __device__ __forceinline__ void for_each_product(const float (&weights)[kKeyGroups][4],
                                                   unsigned values, const Multiply& multiply) {
    if (stream_.value_columns() > kTileColumns / 2) {
      for_each_product<Element, kValueGroups>(weights, values, multiply);
    } else {
      for_each_product<Element, kValueGroups / 2>(weights, values, multiply);
    }
  }
  template <class Element, int kGroups, class Multiply>
  __device__ __forceinline__ void for_each_product(const float (&weights)[kKeyGroups][4],
                                                   unsigned values, const Multiply& multiply) {
#pragma unroll
    for (int step = 0; step < kBlockKeys / 16; ++step) {
      unsigned rounded[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        rounded[i] = pack<Element>(weights[step * 2 + i / 2][i % 2 * 2],
                                   weights[step * 2 + i / 2][i % 2 * 2 + 1]);
      }
#pragma unroll
      for (int pair = 0; pair < kGroups / 2; ++pair) {
        unsigned value[4];
        const int row = step * 16 + lane_ % 16;
        load_matrices_transposed(value, values + chunk_offset(row, pair * 2 + lane_ / 16));
        multiply(sums_[pair * 2], rounded, step, value[0], value[1]);
        multiply(sums_[pair * 2 + 1], rounded, step, value[2], value[3]);
      }
    }
  }

  /// The thread's sums of earlier segments are its own: no one else reads them.
  __device__ __forceinline__ float& earlier(int n, int e) {
    return memory_.earlier[(n * 4 + e) * kWarps * 32 + static_cast<int>(threadIdx.x)];
  }

  /// After the last segment the sums are in registers.
  __device__ __forceinline__ void fold_segment(bool is_last) {
    const Base2Exp exp_of{params_.factor};
    const Fold<float> folds[2] = {{total_[0], segment_[0], exp_of},
                                  {total_[1], segment_[1], exp_of}};
    total_[0] = folds[0].state;
    total_[1] = folds[1].state;
#pragma unroll
    for (int n = 0; n < kValueGroups; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (has_earlier_) sums_[n][e] = folds[e / 2](earlier(n, e), sums_[n][e]);
        if (!is_last) earlier(n, e) = sums_[n][e];
      }
    }
    has_earlier_ = true;
  }

  __device__ __forceinline__ void store_partial() const {
    const Partials<float>& partials = params_.partials;
    const std::int64_t place = task_.sequence * call_.num_kv_heads + task_.kv_head;
    const int column = lane_ % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row_ + row_in_tile(i);
      if (row >= rows_) continue;
      const std::int64_t index = partials.index(place, task_.segment, row);
      if (column == 0 && task_.value_chunk == 0) {
        partials.maximum[index] = segment_[i].maximum;
        partials.sum[index] = segment_[i].sum;
      }
      float* out = partials.out + index * call_.value_dim + stream_.first_value() + column;
      int present = stream_.value_columns() - column;
#pragma unroll
      for (int n = 0; n < kValueGroups; ++n, out += 8, present -= 8) {
        if (present >= 1) out[0] = sums_[n][i * 2];
        if (present >= 2) out[1] = sums_[n][i * 2 + 1];
      }
    }
  }

  __device__ __forceinline__ void store_rows() const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (first_row_ + row_in_tile(i) >= rows_) continue;
      const std::int64_t token = token_[i];
      const std::int64_t head = head_[i];
      const RowResult<float> result =
          finish_row(call_.rules, head, total_[i].maximum * params_.natural, total_[i].sum,
                     exp2f(kWeightShift<Half>));
      if (call_.lse.data != nullptr && lane_ % 4 == 0 && task_.value_chunk == 0) {
        store_lse(call_.lse,
                  sequence_.lse + token * call_.lse.token_stride + head * call_.lse.head_stride,
                  result.lse);
      }
      const std::int64_t start = sequence_.out + token * call_.out.token_stride +
                                 head * call_.out.head_stride + stream_.first_value();
#pragma unroll
      for (int n = 0; n < kValueGroups; ++n) {
        const int column = n * 8 + lane_ % 4 * 2;
        // A row that sees nothing is 0 even where its sums are not; and -0 becomes 0.
        const bool is_seen = total_[i].sum != 0;
        const float low = is_seen ? sums_[n][i * 2] * result.weight + 0.0F : 0.0F;
        const float high = is_seen ? sums_[n][i * 2 + 1] * result.weight + 0.0F : 0.0F;
        store_pair(start + column, stream_.value_columns() - column, low, high);
      }
    }
  }

  __device__ __forceinline__ void store_pair(std::int64_t at, int present, float low,
                                             float high) const {
    if (present >= 2 && params_.aligned_out) {
      *reinterpret_cast<unsigned*>(static_cast<Half*>(call_.out.data) + at) = pack<Half>(low, high);
      return;
    }
    Half* out = static_cast<Half*>(call_.out.data) + at;
    const unsigned both = pack<Half>(low, high);
    if (present >= 1) out[0] = reinterpret_cast<const Half*>(&both)[0];
    if (present >= 2) out[1] = reinterpret_cast<const Half*>(&both)[1];
  }

  const ForwardParams<float>& params_;
  const AttentionParams& call_;
  const ForwardTask& task_;
  const Sequence& sequence_;
  Memory& memory_;
  TileStream<Half, kWarps> stream_;
  const int rows_;
  const int first_row_;
  const int lane_;
  const int warp_;
  int token_[2] = {};
  int head_[2] = {};
  int begin_[2] = {};  // the keys that a row's window leaves
  int end_[2] = {};
  unsigned queries_[kStreamed ? 1 : kQuerySteps][4];
  RowState<float> segment_[2];
  RowState<float> total_[2];
  float sums_[kValueGroups][4];
  unsigned masked_ = 0;  // of the current block's scores, one bit each
  bool has_earlier_ = false;
};

template <class Half, int kWarps, bool kStreamed, bool kFull>
__global__ void __launch_bounds__(32 * kWarps, kWarps == 4 && !kStreamed ? 2 : 1)
    forward_mma(const __grid_constant__ ForwardParams<float> params) {
  using Tile = ForwardTile<Half, kWarps, kStreamed, kFull>;
  extern __shared__ __align__(128) unsigned char shared[];
  const ForwardTask task(params, blockIdx.x);
  Tile(params, task, params.call.sequences[task.sequence],
       *reinterpret_cast<typename Tile::Memory*>(shared))
      .run();
}

}  // namespace ladon::cuda
