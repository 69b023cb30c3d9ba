// Decoding over int8 and fp8 caches: up to 16 query rows of a KV head, a scale and a window as the
// only rules, heads up to 128.
//
// One warp computes a segment of keys: S = Q K^T, 16 rows x 64 keys, with the queries as the M
// operand; weights P in registers; O^T += V^T P^T with the columns of V as the M operand, because
// the weights of 8 rows are then an operand as they are, nothing is exchanged between lanes, and 8
// rows, which most models have, take half the products. The arithmetic, in which operand a number
// is and how lanes share it aside, is that of the kernel for all rules (forward_mma.cuh): same
// bits.
//
// Elements stay bytes in shared memory. A matrix of 16-byte rows gives lane t four neighbours of a
// key, which make up an operand of K if the queries are in the same order (store_product_order()).
// Transposed, a matrix of pairs of bytes gives it two keys of two neighbouring columns, which are
// rows g and g + 8 of an operand of V^T.
//
// A block of 64 keys is 16 KiB, 256 pairs to convert, 64 products with K and 64 (8 rows) with V,
// about 2450 instructions in all. Many warps must be resident to hide their latency: 15 a
// multiprocessor, by 13.5 KiB of shared memory and 128 registers each, read 3.7 TB/s of fp8 on an
// H200; 12, by 168 registers, 3.5 TB/s. Where there are few segments, two warps share each: both
// multiply half of the keys, weigh all scores, and sum half of the columns of V.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/kernels/forward.cuh"
#include "cuda/kernels/scaled_softmax.cuh"
#include "cuda/kernels/scaled_stream.cuh"
#include "cuda/kernels/tensor_core.cuh"
#include "cuda/kernels/tile_elements.cuh"

namespace ladon::cuda {

/// What a block of threads computes, and its rows.
struct DecodeTask {
  ForwardTask task;
  const Sequence& sequence;
  int rows;
  RowHeads heads;

  __device__ __forceinline__ DecodeTask(const ForwardParams<float>& params, unsigned block)
      : task(params, block),
        sequence(params.call.sequences[task.sequence]),
        rows(static_cast<int>(sequence.query_len * params.call.group)),
        heads{static_cast<int>(task.kv_head * params.call.group),
              static_cast<int>(params.call.group)} {}
};

/// kRowGroups of 8 rows.
template <class Half, DType kStored, int kRowGroups, int kWarps, int kBuffers>
class DecodeScaled {
  using Stream = ScaledStream<kWarps, kBuffers>;
  using Softmax = ScaledSoftmax<Half, kRowGroups>;
  using Scores = typename Softmax::Scores;
  static constexpr int kColumns = Stream::kColumns;
  static constexpr int kSteps = kColumns / 16;
  static constexpr int kValueSteps = Stream::kValueColumns / 16;
  static constexpr int kTileGroups = Softmax::kTileGroups;
  using Wide = __nv_bfloat16;  // of V, whose scales are in the weights

  struct WarpMemory {
    typename Stream::Memory stream;
    typename Softmax::Windows windows;
  };
  struct OneWarp {
    WarpMemory warps[1];
  };
  struct TwoWarps {
    WarpMemory warps[2];
    // Scores of a block, by the warp that has them. There are two, so that one can be written while
    // the other is read.
    float exchanged[2][2][kKeyGroups * kRowGroups][32];
  };

 public:
  using Memory = std::conditional_t<kWarps == 1, OneWarp, TwoWarps>;

  __device__ __forceinline__ DecodeScaled(const ForwardParams<float>& params,
                                          const DecodeTask& decode, Memory& memory)
      : params_(params),
        call_(params.call),
        memory_(memory),
        own_(memory.warps[Stream::warp()].stream),
        stream_(params, decode.sequence, decode.task, own_),
        softmax_(params, decode.sequence, decode.rows, memory.warps[Stream::warp()].windows) {}

  __device__ __forceinline__ void run(const DecodeTask& decode) {
    if (decode.rows == 0) return;
    BlockRange blocks =
        visible_blocks(call_.rules, decode.sequence, 0, (decode.rows - 1) / call_.group);
    if (is_partial()) {
      blocks = blocks_in_segment(short_segments(), decode.sequence, blocks, decode.task.segment);
      if (blocks.begin == blocks.end) return;
    }
    load_queries(decode);
    stream_.start(blocks);
    for (int block = blocks.begin; block < blocks.end; ++block) run_block(block);
    softmax_.finish();
    // The task again, so that it does not take registers in between.
    const DecodeTask again(params_, fresh(blockIdx.x));
    is_partial() ? store_partial(again) : store_rows(again);
  }

 private:
  __device__ __forceinline__ static int lane() { return Stream::lane(); }
  __device__ __forceinline__ bool is_partial() const { return params_.partials.maximum != nullptr; }
  __device__ __forceinline__ static bool is_long(int columns) { return columns > kColumns / 2; }

  /// By way of shared memory, which no tile has come to yet.
  __device__ __forceinline__ void load_queries(const DecodeTask& decode) {
    constexpr int kRowBytes = kColumns * 2;
    const unsigned tile = shared_address(own_.tiles);
    const auto address = [&](int row, int chunk) {
      return tile + row * kRowBytes + ((chunk ^ (row & 7)) * 16);
    };
    const int chunk = lane() % 16;
    for (int row = lane() / 16; row < 16; row += 2) {
      uint4 eight = make_uint4(0, 0, 0, 0);
      const int present =
          min(kChunkElements, static_cast<int>(call_.head_dim) - chunk * kChunkElements);
      if (row < decode.rows && present > 0) {
        const QueryRow query = decode.heads.query_of(row);
        const Half* from = static_cast<const Half*>(call_.q.data) + decode.sequence.q +
                           query.token * call_.q.token_stride + query.head * call_.q.head_stride +
                           chunk * kChunkElements;
        eight = params_.aligned_q ? *reinterpret_cast<const uint4*>(from)
                                  : load_eight<Half>(from, present);
      }
      store_product_order(address(row, chunk & ~1) + chunk % 2 * 8, eight);
    }
    __syncwarp();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      load_matrices(queries_[step], address(lane() % 16, step * 2 + lane() / 16));
    }
    __syncwarp();
  }

  /// The parts are a loop, and its code there once for both halves: the instruction cache is small.
  __device__ __forceinline__ void run_block(int block) {
    Scores scores = {};
    unsigned masked = 0;
#pragma unroll 1
    for (int part = 0; part < Stream::kParts; ++part) {
      const int buffer = stream_.next();
      const unsigned tile = shared_address(own_.tiles[buffer]);
      const float* const scales = own_.scales[buffer];
      if (part < Stream::kKeyParts) {
        Softmax::move_up(scores);
        float products[kTileGroups][4] = {};
        // A lane's row and chunk. Computed again each time, or it would be kept in registers.
        const unsigned own_lane = fresh(lane());
        const unsigned row = own_lane % 8;
        const unsigned place = tile + row * kColumns + ((own_lane / 8 ^ row) * 16);
        multiply_keys<0>(products, place);
        if (is_long(stream_.key_columns())) multiply_keys<kSteps / 2>(products, place ^ 64);
        softmax_.apply_scales(scores, products, scales);
        if (part < Stream::kKeyParts - 1) continue;
        if constexpr (kWarps == 2) exchange(scores, block);
        softmax_.apply_window(scores, stream_.first_key(block));
        masked = Softmax::masked_of(scores);
        float factors[kRowGroups];
        softmax_.weigh(scores, factors);
        rescale(factors);
      } else {
        softmax_.scale_weights(scores, masked, scales);
        masked >>= kTileGroups * 2 * kRowGroups;
        const unsigned own_lane = fresh(lane());
        const unsigned row = own_lane % 16;
        const unsigned place = tile + row * kColumns + ((own_lane / 16 ^ row % 8) * 16);
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          const typename Softmax::Weights weights(scores, step * 2);
          multiply_values<0>(weights, place + step * 16 * kColumns);
          if constexpr (kWarps == 1) {
            if (is_long(stream_.value_columns())) {
              multiply_values<kSteps / 2>(weights, (place ^ 64) + step * 16 * kColumns);
            }
          }
        }
        Softmax::move_up(scores);
      }
    }
  }

  /// Each warp has one half, as the upper; now both have both.
  __device__ __forceinline__ void exchange(Scores& scores, int block) {
    constexpr int kHalf = kKeyGroups * kRowGroups;
    auto& exchanged = memory_.exchanged[block % 2];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      exchanged[Stream::warp()][i][lane()] =
          scores[kTileGroups + i / (2 * kRowGroups)][i % (2 * kRowGroups)];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2 * kHalf; ++i) {
      scores[i / (2 * kRowGroups)][i % (2 * kRowGroups)] = exchanged[i / kHalf][i % kHalf][lane()];
    }
  }

  /// Steps [kFirst, kFirst + 4) of 16 elements, over the keys of a tile. `place` is where the
  /// lane's row of matrices is, of the first 8 keys.
  template <int kFirst>
  __device__ __forceinline__ void multiply_keys(float (&products)[kTileGroups][4], unsigned place) {
    const CodePairs<Half, kStored> pairs;
#pragma unroll
    for (int n = 0; n < kTileGroups; ++n) {
      unsigned codes[4];
      load_matrices(codes, place + n * 8 * kColumns);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        multiply_add<Half>(products[n], queries_[kFirst + i], pairs.template pair<0, 1>(codes[i]),
                           pairs.template pair<2, 3>(codes[i]));
      }
    }
  }

  /// By factors of the rows lane / 4.
  __device__ __forceinline__ void rescale(const float (&factors)[kRowGroups]) {
    bool changes = false;
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i) changes = changes || factors[i] != 1;
    if (!__any_sync(0xffffffffU, changes)) return;
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float factor = of_row(factors[i], e);
#pragma unroll
        for (int m = 0; m < kValueSteps; ++m) {
          sums_[i][m][e] *= factor;
          sums_[i][m][2 + e] *= factor;
        }
      }
    }
  }
  /// What the lanes of row 2 (lane % 4) + e, of a group of 8, have.
  __device__ __forceinline__ static float of_row(float value, int e) {
    return __shfl_sync(0xffffffffU, value, lane() % 4 * 8 + e * 4);
  }

  /// Columns [16 kFirst, 16 kFirst + 64) of V, over 16 keys. `place` is where the lane's row of
  /// matrices is, of the first 32 columns.
  template <int kFirst>
  __device__ __forceinline__ void multiply_values(const typename Softmax::Weights& weights,
                                                  unsigned place) {
    const CodePairs<Wide, kStored> pairs;
#pragma unroll
    for (int m = 0; m < kSteps / 2; m += 2) {
      unsigned codes[4];
      load_matrices_transposed(codes, place ^ (m * 16));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const unsigned values[4] = {pairs.template pair<0, 2>(codes[j * 2]),
                                    pairs.template pair<1, 3>(codes[j * 2]),
                                    pairs.template pair<0, 2>(codes[j * 2 + 1]),
                                    pairs.template pair<1, 3>(codes[j * 2 + 1])};
#pragma unroll
        for (int i = 0; i < kRowGroups; ++i) {
          float(&sums)[4] = sums_[i][kFirst + m + j];
          multiply_add<Wide>(sums, values, weights.rounded[i][0], weights.rounded[i][1]);
          multiply_add<Wide>(sums, values, weights.rests[i][0], weights.rests[i][1]);
        }
      }
    }
  }

  /// Calls visit(i, e, row) for the rows of which the thread has sums.
  template <class Visit>
  __device__ __forceinline__ void for_each_row(const Visit& visit) const {
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        visit(i, e, i * 8 + lane() % 4 * 2 + e);
      }
    }
  }

  __device__ __forceinline__ void store_partial(const DecodeTask& decode) const {
    const Partials<float>& partials = params_.partials;
    const ForwardTask& task = decode.task;
    const std::int64_t place = task.sequence * call_.num_kv_heads + task.kv_head;
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i) {
      const int row = lane() / 4 + i * 8;
      if (row >= decode.rows || lane() % 4 != 0 || Stream::first_value(task) != 0) continue;
      const std::int64_t index = partials.index(place, task.segment, row);
      partials.maximum[index] = softmax_.state(i).maximum;
      partials.sum[index] = softmax_.state(i).sum;
    }
    for_each_row([&](int i, int e, int row) {
      if (row >= decode.rows) return;
      const std::int64_t index = partials.index(place, task.segment, row);
      float* const out = partials.out + index * call_.value_dim + Stream::first_value(task);
      for_each_column(
          [&](int m, int column, int half) { out[column] = sums_[i][m][half * 2 + e]; });
    });
  }

  __device__ __forceinline__ void store_rows(const DecodeTask& decode) const {
    const Sequence& sequence = decode.sequence;
    const std::int64_t first_value = Stream::first_value(decode.task);
    for_each_row([&](int i, int e, int row) {
      const float maximum = of_row(softmax_.state(i).maximum, e);
      const float sum = of_row(softmax_.state(i).sum, e);
      if (row >= decode.rows) return;
      const QueryRow query = decode.heads.query_of(row);
      const RowResult<float> result = finish_row(call_.rules, query.head, maximum * params_.natural,
                                                 sum, exp2f(kWeightShift<Half>));
      if (call_.lse.data != nullptr && lane() / 4 == 0 && first_value == 0) {
        store_lse(call_.lse,
                  sequence.lse + query.token * call_.lse.token_stride +
                      query.head * call_.lse.head_stride,
                  result.lse);
      }
      Half* const out = static_cast<Half*>(call_.out.data) + sequence.out +
                        query.token * call_.out.token_stride + query.head * call_.out.head_stride +
                        first_value;
      for_each_column([&](int m, int column, int half) {
        // A row that saw no key is 0, even where the sums are not.
        out[column] = Half(sum == 0 ? 0.0F : result_of(sums_[i][m][half * 2 + e], result.weight));
      });
    });
  }

  /// Calls visit(m, column, half) for the columns of which the thread has sums, in pairs.
  template <class Visit>
  __device__ __forceinline__ void for_each_column(const Visit& visit) const {
#pragma unroll
    for (int m = 0; m < kValueSteps; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int column = m * 16 + lane() / 4 * 2 + half;
        if (column < stream_.value_columns()) visit(m, column, half);
      }
    }
  }

  const ForwardParams<float>& params_;
  const AttentionParams& call_;
  Memory& memory_;
  typename Stream::Memory& own_;
  Stream stream_;
  Softmax softmax_;
  unsigned queries_[kSteps][4];
  // [i][m][e] is of row 2 (lane % 4) + e % 2 + 8 i and column 16 m + 2 (lane / 4) + e / 2.
  float sums_[kRowGroups][kValueSteps][4] = {};
};

/// Blocks of threads for which a multiprocessor must have registers: where there are few segments,
/// latency counts.
constexpr int least_decode_blocks(int row_groups, int warps) {
  return warps == 2 ? 2 : row_groups == 1 ? 15 : 8;
}

template <class Half, DType kStored, int kRowGroups, int kWarps>
__global__ void __launch_bounds__(32 * kWarps, least_decode_blocks(kRowGroups, kWarps))
    decode_scaled(const __grid_constant__ ForwardParams<float> params) {
  using Decode = DecodeScaled<Half, kStored, kRowGroups, kWarps, 3>;
  __shared__ typename Decode::Memory memory;
  const DecodeTask decode(params, blockIdx.x);
  Decode(params, decode, memory).run(decode);
}

}  // namespace ladon::cuda
