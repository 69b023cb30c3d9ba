// The backward pass with plain FMA: every dtype, option and head_dim. Also the tiles of 16-bit
// tensors that meet NaN or infinity, because it skips masked terms where tensor cores would
// multiply them with 0.
//
// A block of 256 threads owns one result tile: 64 keys of dk or dv, or 64 rows of dq, by 128
// columns (64 in double). For each tile that it meets it computes dP and S, 64 x 64, from slabs of
// 32 columns of both operands; turns them into P or dS in shared memory; and multiplies that with
// slabs of 64 columns of the right operand. A thread has 4 x 4 elements of each product, so that 2
// loads of 16 bytes serve 16 FMA.
//
// Flops: 4 * head_dim + 2 * value_dim for each score of dq and dk, 2 * (head_dim + value_dim) of
// dv; more above 128 columns, where each 128 compute the scores again. Bytes: all operands once for
// each tile, which L2 holds. Expected limit: FMA and shared memory alike, at half of FMA's peak.
//
// No chain of additions is long: 32 columns of a dot product, 64 terms of a tile, 64 tiles, and
// then those sums.
#pragma once

#include <cstdint>

#include "cuda/kernels/backward.cuh"

namespace ladon::cuda::backward {

inline constexpr int kSimtThreads = 256;
inline constexpr int kSlab = 32;       // columns of a dot product's operands in shared memory
inline constexpr int kFoldTiles = 64;  // tiles whose sums are added before they are folded

template <class Compute>
struct SimtShape {
  static constexpr int kGroups = sizeof(Compute) == 4 ? 2 : 1;  // of 64 columns
  static constexpr int kColumns = kGroups * kTile;
  static constexpr int kPad = 16 / sizeof(Compute);  // keeps rows aligned and banks apart
  static constexpr int kSlabPitch = kSlab + kPad;
  static constexpr int kPitch = kTile + kPad;
};

template <class Compute>
struct SimtShared {
  using Shape = SimtShape<Compute>;
  // Two slabs [64][kSlabPitch], or one matrix [64][kPitch].
  alignas(16) Compute slabs[2 * kTile * Shape::kSlabPitch];
  alignas(16) Compute matrix[kTile * Shape::kPitch];  // [other][own]: dP, then P or dS
  alignas(16) Compute folded[Shape::kGroups * 16 * kSimtThreads];
  static_assert(2 * Shape::kSlabPitch >= Shape::kPitch);
};

/// Rows of a tile in global memory.
struct RowSource {
  const void* data;
  DType dtype;
  std::int64_t start;  // element of the first row
  std::int64_t stride;
  std::int64_t dim;
  std::int64_t count;  // rows that exist, perhaps more than the tile has
};
__device__ inline RowSource row_source(const Operand& operand, std::int64_t offset,
                                       std::int64_t head, std::int64_t begin, std::int64_t end,
                                       std::int64_t dim) {
  return {operand.data,
          operand.dtype,
          offset + begin * operand.token_stride + head * operand.head_stride,
          operand.token_stride,
          dim,
          end - begin};
}

/// The operands of a tile of rows and a tile of keys that meet.
struct PairSources {
  RowSource q, dout, k, v;
};
__device__ inline PairSources pair_sources(const AttentionParams& call, const Sequence& sequence,
                                           std::int64_t head, std::int64_t token_begin,
                                           std::int64_t key_begin) {
  const std::int64_t kv_head = head / call.group;
  const std::int64_t tokens = sequence.query_len;
  const std::int64_t keys = sequence.kv_len;
  return {row_source(call.q, sequence.q, head, token_begin, tokens, call.head_dim),
          row_source(call.dout, sequence.dout, head, token_begin, tokens, call.value_dim),
          row_source(call.k, sequence.k, kv_head, key_begin, keys, call.head_dim),
          row_source(call.v, sequence.v, kv_head, key_begin, keys, call.value_dim)};
}

/// Copies kColumns columns of a tile's rows to shared memory; 0 where there are none.
template <int kColumns, class Compute>
__device__ inline void load_slab(const RowSource& source, std::int64_t column, int pitch,
                                 Compute* slab) {
  constexpr int kRowsAtOnce = kSimtThreads / kColumns;
  const int own_column = static_cast<int>(threadIdx.x) % kColumns;
  const int first_row = static_cast<int>(threadIdx.x) / kColumns;
  const bool inside = column + own_column < source.dim;
  const std::int64_t start = source.start + column + own_column;
  with_storage_type(source.dtype, [&](auto type) {
    using Storage = decltype(type);
    const auto* from = static_cast<const Storage*>(source.data);
#pragma unroll
    for (int i = 0; i < kTile / kRowsAtOnce; ++i) {
      const int row = first_row + i * kRowsAtOnce;
      const bool exists = inside && row < source.count;
      slab[row * pitch + own_column] =
          exists ? widened<Compute>(from[start + row * source.stride]) : Compute{0};
    }
  });
}

/// Four elements by loads of 16 bytes.
template <class Compute>
__device__ inline void load_four(const Compute* from, Compute (&to)[4]) {
  constexpr int kLanes = 16 / sizeof(Compute);
  struct alignas(16) Pack {
    Compute lanes[kLanes];
  };
#pragma unroll
  for (int i = 0; i < 4; i += kLanes) {
    const Pack pack = *reinterpret_cast<const Pack*>(from + i);
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) to[i + lane] = pack.lanes[lane];
  }
}

/// The place of a thread in the 16 x 16 threads of a block. It has the own rows y + 16 a and the
/// other rows x + 16 b of the scores, and the own rows 4 y + a of the result.
struct ThreadPlace {
  int x = static_cast<int>(threadIdx.x) % 16;
  int y = static_cast<int>(threadIdx.x) / 16;
};

/// Adds the products of two slabs' rows to sums[own][other].
template <class Compute>
__device__ inline void add_slab_products(const Compute* own, const Compute* other,
                                         const ThreadPlace& place, Compute (&sums)[4][4]) {
  constexpr int kPitch = SimtShape<Compute>::kSlabPitch;
  Compute products[4][4] = {};
#pragma unroll 2
  for (int column = 0; column < kSlab; column += 4) {
    Compute right[4][4];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      load_four(other + (place.x + 16 * b) * kPitch + column, right[b]);
    }
#pragma unroll
    for (int a = 0; a < 4; ++a) {
      Compute left[4];
      load_four(own + (place.y + 16 * a) * kPitch + column, left);
#pragma unroll
      for (int b = 0; b < 4; ++b) {
#pragma unroll
        for (int i = 0; i < 4; ++i) products[a][b] = fma(left[i], right[b][i], products[a][b]);
      }
    }
  }
#pragma unroll
  for (int a = 0; a < 4; ++a) {
#pragma unroll
    for (int b = 0; b < 4; ++b) sums[a][b] += products[a][b];
  }
}

/// sums[own][other] = the dot products of the rows of two tiles. Begins with a barrier, so that the
/// block may have used shared memory before; ends without one.
template <class Compute>
__device__ inline void dot_products(const RowSource& own, const RowSource& other,
                                    const ThreadPlace& place, Compute* slabs,
                                    Compute (&sums)[4][4]) {
  constexpr int kPitch = SimtShape<Compute>::kSlabPitch;
  Compute* const other_slab = slabs + kTile * kPitch;
#pragma unroll
  for (int a = 0; a < 4; ++a) {
#pragma unroll
    for (int b = 0; b < 4; ++b) sums[a][b] = 0;
  }
  for (std::int64_t column = 0; column < own.dim; column += kSlab) {
    __syncthreads();
    load_slab<kSlab>(own, column, kPitch, slabs);
    load_slab<kSlab>(other, column, kPitch, other_slab);
    __syncthreads();
    add_slab_products(slabs, other_slab, place, sums);
  }
}

/// Stores what a thread has of the scores to its places of a [other][own] matrix.
template <class Compute>
__device__ inline void store_scores(const Compute (&scores)[4][4], const ThreadPlace& place,
                                    Compute* matrix) {
#pragma unroll
  for (int a = 0; a < 4; ++a) {
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      matrix[(place.x + 16 * b) * SimtShape<Compute>::kPitch + place.y + 16 * a] = scores[a][b];
    }
  }
}

/// Which numbers of a score the result is made of.
enum class GradientOf { kWeights, kBiasedScores, kScaledScores };

// A masked element of the matrix is -0.0, which no visible one is: the products skip it.
__device__ inline bool is_masked(float x) { return __float_as_uint(x) == 0x80000000U; }
__device__ inline bool is_masked(double x) {
  return __double_as_longlong(x) == static_cast<long long>(0x8000000000000000ULL);
}

/// Fills shared.matrix with P or dS of a tile of rows and a tile of keys. A thread may read its own
/// elements at once, other threads after a barrier.
template <class Compute, bool kOwnKeys>
__device__ inline void fill_matrix(const BackwardParams& params, const Sequence& sequence,
                                   std::int64_t row_start, std::int64_t head,
                                   std::int64_t token_begin, std::int64_t key_begin, GradientOf of,
                                   SimtShared<Compute>& shared) {
  const ThreadPlace place;
  const PairSources from = pair_sources(params.call, sequence, head, token_begin, key_begin);
  Compute scores[4][4];
  if (of != GradientOf::kWeights) {
    dot_products(kOwnKeys ? from.v : from.dout, kOwnKeys ? from.dout : from.v, place, shared.slabs,
                 scores);
    store_scores(scores, place, shared.matrix);
  }
  dot_products(kOwnKeys ? from.k : from.q, kOwnKeys ? from.q : from.k, place, shared.slabs, scores);
  __syncthreads();  // the slabs are read
  // Through shared memory, so that the rules are a loop over elements and not 16 copies of it.
  store_scores(scores, place, shared.slabs);
  const RowStats<Compute>* stats = stats_of<Compute>(params, head, row_start);
#pragma unroll 1
  for (int element = 0; element < 16; ++element) {
    const int own = place.y + 16 * (element / 4);
    const int other = place.x + 16 * (element % 4);
    const int at = other * SimtShape<Compute>::kPitch + own;
    const std::int64_t token = token_begin + (kOwnKeys ? other : own);
    const std::int64_t key = key_begin + (kOwnKeys ? own : other);
    Compute value = -Compute{0};
    if (token < sequence.query_len) {
      const Compute dweight = of == GradientOf::kWeights ? Compute{0} : shared.matrix[at];
      const ScoreGradient<Compute> gradient =
          score_gradient(params.call.rules, sequence, QueryRow{token, head}, key, shared.slabs[at],
                         dweight, stats[token]);
      if (gradient.visible) {
        value = of == GradientOf::kWeights        ? gradient.weight
                : of == GradientOf::kBiasedScores ? gradient.biased
                                                  : gradient.scaled;
        value += Compute{0};  // -0.0 becomes +0.0
      }
    }
    shared.matrix[at] = value;
  }
}

/// sums[own][column] += matrix^T times a slab of 64 columns, skipping what is masked.
template <class Compute>
__device__ inline void add_matrix_product(const Compute* matrix, const Compute* slab,
                                          const ThreadPlace& place, Compute (&sums)[4][4]) {
  constexpr int kPitch = SimtShape<Compute>::kPitch;
  Compute products[4][4] = {};
#pragma unroll 4
  for (int other = 0; other < kTile; ++other) {
    Compute left[4];
    Compute right[4];
    load_four(matrix + other * kPitch + 4 * place.y, left);
    load_four(slab + other * kPitch + 4 * place.x, right);
#pragma unroll
    for (int a = 0; a < 4; ++a) {
      if (is_masked(left[a])) continue;
#pragma unroll
      for (int b = 0; b < 4; ++b) products[a][b] = fma(left[a], right[b], products[a][b]);
    }
  }
#pragma unroll
  for (int a = 0; a < 4; ++a) {
#pragma unroll
    for (int b = 0; b < 4; ++b) sums[a][b] += products[a][b];
  }
}

/// The sums of a result tile: since the last fold in registers, up to it in shared memory.
template <class Compute>
class ResultSums {
 public:
  static constexpr int kGroups = SimtShape<Compute>::kGroups;

  __device__ explicit ResultSums(Compute* folded) : folded_(folded + threadIdx.x) {
#pragma unroll
    for (int i = 0; i < kGroups * 16; ++i) folded_[i * kSimtThreads] = 0;
  }

  /// Adds matrix^T times columns [first_column, first_column + kColumns) of the rows of `right`.
  __device__ void add(const RowSource& right, std::int64_t first_column,
                      SimtShared<Compute>& shared) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const std::int64_t column = first_column + group * kTile;
      if (column >= right.dim) continue;
      __syncthreads();  // the matrix is there, the slab before is read
      load_slab<kTile>(right, column, SimtShape<Compute>::kPitch, shared.slabs);
      __syncthreads();
      add_matrix_product(shared.matrix, shared.slabs, place_, recent_[group]);
    }
    if (++tiles_ % kFoldTiles == 0) fold();
  }

  /// Calls store(own row, column of the tile, sum) for all elements of this thread.
  template <class Store>
  __device__ void for_each(const Store& store) {
    fold();
#pragma unroll 1
    for (int i = 0; i < kGroups * 16; ++i) {
      store(4 * place_.y + i / 4 % 4, kTile * (i / 16) + 4 * place_.x + i % 4,
            folded_[i * kSimtThreads]);
    }
  }

 private:
  __device__ void fold() {
#pragma unroll
    for (int i = 0; i < kGroups * 16; ++i) {
      Compute& recent = recent_[i / 16][i / 4 % 4][i % 4];
      folded_[i * kSimtThreads] += recent;
      recent = 0;
    }
  }

  const ThreadPlace place_;
  Compute* const folded_;
  std::int64_t tiles_ = 0;
  Compute recent_[kGroups][4][4] = {};
};

/// One of dq, dk and dv: where it goes, and what it is made of.
struct ResultTile {
  Operand operand;
  std::int64_t offset;  // of the sequence
  std::int64_t head;
  std::int64_t dim;
  std::int64_t first_column;
  GradientOf of;
};

/// Computes and writes one result tile. `right(pair)` is the operand that P or dS multiply.
template <class Compute, bool kOwnKeys, class Right>
__device__ inline void write_result_tile(const BackwardParams& params,
                                         const TileWalk<kOwnKeys>& walk, const ResultTile& result,
                                         SimtShared<Compute>& shared, const Right& right) {
  ResultSums<Compute> sums(shared.folded);
  OtherTile other = walk.first();
  for (std::int64_t step = walk.num_steps(); step > 0; --step, other = walk.after(other)) {
    const std::int64_t token_begin = walk.token_begin(other);
    const std::int64_t key_begin = walk.key_begin(other);
    fill_matrix<Compute, kOwnKeys>(params, walk.sequence, walk.row_start, other.head, token_begin,
                                   key_begin, result.of, shared);
    sums.add(right(pair_sources(params.call, walk.sequence, other.head, token_begin, key_begin)),
             result.first_column, shared);
  }
  const std::int64_t begin = walk.own_tile * kTile;
  const std::int64_t end = kOwnKeys ? walk.sequence.kv_len : walk.sequence.query_len;
  const std::int64_t start = result.offset + result.head * result.operand.head_stride;
  const bool of_weights = result.of == GradientOf::kWeights;
  const Compute scale = of_weights ? Compute{1} : static_cast<Compute>(params.call.rules.scale);
  sums.for_each([&](int row, int column_of_tile, Compute sum) {
    const std::int64_t column = result.first_column + column_of_tile;
    if (begin + row >= end || column >= result.dim) return;
    store_element(result.operand.data, result.operand.dtype,
                  start + (begin + row) * result.operand.token_stride + column, sum * scale);
  });
}

/// Blocks that a result of `dim` columns needs for each of its tiles.
template <class Compute>
__host__ __device__ constexpr std::int64_t column_parts(const Operand& result, std::int64_t dim) {
  constexpr std::int64_t kColumns = SimtShape<Compute>::kColumns;
  return result.data == nullptr ? 0 : (dim + kColumns - 1) / kColumns;
}

}  // namespace ladon::cuda::backward
