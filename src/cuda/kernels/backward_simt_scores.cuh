// The backward pass with plain FMA: every dtype, option and head_dim. Also the tiles of 16-bit
// tensors that meet NaN or infinity, because it skips masked terms where tensor cores would
// multiply them with 0.
//
// A block owns one result tile: 64 keys of dk or dv, or 64 rows of dq, by 128 columns (64 in
// double). For each tile that it meets it computes dP and S, 64 x 64, from slabs of 32 columns (16
// in double) of both operands; turns them into P or dS in shared memory; and multiplies that with
// slabs of 64 columns of the right operand. A thread has 8 x 4 elements of each product (4 x 4 in
// double, with twice the threads), so that 3 loads of 16 bytes serve 32 FMA.
//
// Flops: 4 * head_dim + 2 * value_dim for each score of dq and dk, 2 * (head_dim + value_dim) of
// dv; more above 128 columns, where each 128 compute the scores again. Bytes: all operands once for
// each tile, which L2 holds. Expected limit: FMA, at half of its peak, because loads and
// barriers are not hidden by more than two blocks.
//
// No chain of additions is long: 32 columns of a dot product, 64 terms of a tile, 64 tiles, and
// then those sums.
#pragma once

#include <cstdint>

#include "cuda/kernels/backward.cuh"

namespace ladon::cuda::backward {

template <class Compute>
struct SimtShape {
  static constexpr int kThreads = sizeof(Compute) == 4 ? 128 : 256;
  static constexpr int kBlocks = sizeof(Compute) == 4 ? 2 : 1;  // on a multiprocessor
  static constexpr int kThreadRows = kThreads / 16;             // threads are 16 wide
  static constexpr int kOwn = kTile / kThreadRows;              // own rows of a thread
  static constexpr int kElements = kOwn * 4;                    // of one product, of a thread
  static constexpr int kGroups = sizeof(Compute) == 4 ? 2 : 1;  // of 64 columns
  static constexpr int kColumns = kGroups * kTile;
  static constexpr int kSlab = sizeof(Compute) == 4 ? 32 : 16;  // columns of a dot product's slabs
  static constexpr int kPad = 16 / sizeof(Compute);  // keeps rows aligned and banks apart
  static constexpr int kSlabPitch = kSlab + kPad;
  static constexpr int kPitch = kTile + kPad;
};

template <class Compute>
struct SimtShared {
  using Shape = SimtShape<Compute>;
  // Two slabs [64][kSlabPitch], or one matrix [64][kPitch].
  static constexpr int kSlabElements =
      kTile * (2 * Shape::kSlabPitch > Shape::kPitch ? 2 * Shape::kSlabPitch : Shape::kPitch);
  alignas(16) Compute slabs[kSlabElements];
  alignas(16) Compute matrix[kTile * Shape::kPitch];  // [other][own]: dP, then P or dS
  alignas(16) Compute folded[Shape::kGroups * Shape::kElements * Shape::kThreads];
  alignas(16) unsigned char walk[256];  // a TileWalk
};

/// What a thread has of a product: own rows by 4 other rows, or by 4 columns.
template <class Compute>
using ThreadTile = Compute[SimtShape<Compute>::kOwn][4];

/// Rows of a tile in global memory.
struct RowSource {
  const void* first;
  DType dtype;
  std::int64_t stride;
  std::int32_t dim;
  std::int32_t count;  // rows that exist
};

/// A tile of rows and a tile of keys that meet. Small, and what follows from it is computed when it
/// is needed, because the products leave few registers.
struct TilePair {
  const BackwardParams& params;
  std::int32_t index;  // of the sequence
  std::int32_t head;
  std::int32_t row_tile;
  std::int32_t key_tile;

  __device__ const Sequence& sequence() const { return params.call.sequences[index]; }
  __device__ std::int64_t token_begin() const { return std::int64_t{row_tile} * kTile; }
  __device__ std::int64_t key_begin() const { return std::int64_t{key_tile} * kTile; }

  __device__ RowSource q() const {
    return row_source(params.call.q, sequence().q, params.call.head_dim);
  }
  __device__ RowSource dout() const {
    return row_source(params.call.dout, sequence().dout, params.call.value_dim);
  }
  __device__ RowSource k() const {
    return key_source(params.call.k, sequence().k, params.call.head_dim);
  }
  __device__ RowSource v() const {
    return key_source(params.call.v, sequence().v, params.call.value_dim);
  }

 private:
  __device__ RowSource row_source(const Operand& operand, std::int64_t offset,
                                  std::int64_t dim) const {
    return source(operand, offset + head * operand.head_stride, token_begin(), sequence().query_len,
                  dim);
  }
  __device__ RowSource key_source(const Operand& operand, std::int64_t offset,
                                  std::int64_t dim) const {
    const std::int32_t kv_head = head / static_cast<std::int32_t>(params.call.group);
    return source(operand, offset + kv_head * operand.head_stride, key_begin(), sequence().kv_len,
                  dim);
  }
  __device__ static RowSource source(const Operand& operand, std::int64_t start, std::int64_t begin,
                                     std::int64_t end, std::int64_t dim) {
    const std::int64_t element = start + begin * operand.token_stride;
    return {static_cast<const unsigned char*>(operand.data) +
                element * static_cast<std::int64_t>(size_of(operand.dtype)),
            operand.dtype, operand.token_stride, static_cast<std::int32_t>(dim),
            static_cast<std::int32_t>(end - begin < kTile ? end - begin : kTile)};
  }
};

/// Copies kColumns columns of a tile's rows to shared memory; 0 where there are none.
template <int kColumns, class Compute>
__device__ inline void load_slab(const RowSource& source, std::int32_t first_column, int pitch,
                                 Compute* slab) {
  constexpr int kRowsAtOnce = SimtShape<Compute>::kThreads / kColumns;
  const int column = static_cast<int>(threadIdx.x) % kColumns;
  const int first_row = static_cast<int>(threadIdx.x) / kColumns;
  const int count = first_column + column < source.dim ? source.count : 0;
  with_storage_type(source.dtype, [&](auto type) {
    using Storage = decltype(type);
    const auto* from = static_cast<const Storage*>(source.first) + first_row * source.stride +
                       first_column + column;
#pragma unroll 16
    for (int i = 0; i < kTile / kRowsAtOnce; ++i, from += kRowsAtOnce * source.stride) {
      const int row = first_row + i * kRowsAtOnce;
      slab[row * pitch + column] = row < count ? widened<Compute>(*from) : Compute{0};
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

/// The place of a thread in its block, which is 16 threads wide. It has the own rows y +
/// kThreadRows a and the other rows x + 16 b of the scores, and the own rows kOwn y + a of the
/// result.
template <class Compute>
struct ThreadPlace {
  int x = static_cast<int>(threadIdx.x) % 16;
  int y = static_cast<int>(threadIdx.x) / 16;

  __device__ int own(int a) const { return y + SimtShape<Compute>::kThreadRows * a; }
  __device__ int other(int b) const { return x + 16 * b; }
  /// Of a score in a [other][own] matrix.
  __device__ int at(int a, int b) const { return other(b) * SimtShape<Compute>::kPitch + own(a); }
};

template <class Compute>
__device__ inline void add_tile(const ThreadTile<Compute>& from, ThreadTile<Compute>& to) {
#pragma unroll
  for (int i = 0; i < SimtShape<Compute>::kElements; ++i) to[i / 4][i % 4] += from[i / 4][i % 4];
}

/// Adds the products of two slabs' rows to sums[own][other].
template <class Compute>
__device__ inline void add_slab_products(const Compute* own, const Compute* other,
                                         ThreadTile<Compute>& sums) {
  using Shape = SimtShape<Compute>;
  const ThreadPlace<Compute> place;
  ThreadTile<Compute> products = {};
#pragma unroll 1
  for (int column = 0; column < Shape::kSlab; column += 4) {
    Compute right[4][4];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      load_four(other + place.other(b) * Shape::kSlabPitch + column, right[b]);
    }
#pragma unroll
    for (int a = 0; a < Shape::kOwn; ++a) {
      Compute left[4];
      load_four(own + place.own(a) * Shape::kSlabPitch + column, left);
#pragma unroll
      for (int b = 0; b < 4; ++b) {
#pragma unroll
        for (int i = 0; i < 4; ++i) products[a][b] = fma(left[i], right[b][i], products[a][b]);
      }
    }
  }
  add_tile<Compute>(products, sums);
}

/// The dot products of the rows of two tiles, to the thread's places of a [other][own] matrix.
/// Begins with a barrier, so that the block may have used the slabs before. The slabs may be the
/// matrix.
template <class Compute>
__device__ inline void dot_products(const RowSource& own, const RowSource& other, Compute* slabs,
                                    Compute* matrix) {
  using Shape = SimtShape<Compute>;
  Compute* const other_slab = slabs + kTile * Shape::kSlabPitch;
  ThreadTile<Compute> sums = {};
  for (std::int32_t column = 0; column < own.dim; column += Shape::kSlab) {
    __syncthreads();
    load_slab<Shape::kSlab>(own, column, Shape::kSlabPitch, slabs);
    load_slab<Shape::kSlab>(other, column, Shape::kSlabPitch, other_slab);
    __syncthreads();
    add_slab_products<Compute>(slabs, other_slab, sums);
  }
  if (slabs == matrix) __syncthreads();  // the slabs are read
  const ThreadPlace<Compute> place;
#pragma unroll
  for (int i = 0; i < Shape::kElements; ++i) matrix[place.at(i / 4, i % 4)] = sums[i / 4][i % 4];
}

/// Which numbers of a score the result is made of.
enum class GradientOf { kWeights, kBiasedScores, kScaledScores };

// A masked element of the matrix is -0.0, which no visible one is: the products skip it.
__device__ inline bool is_masked(float x) { return __float_as_uint(x) == 0x80000000U; }
__device__ inline bool is_masked(double x) {
  return __double_as_longlong(x) == static_cast<long long>(0x8000000000000000ULL);
}

/// Fills shared.matrix with P or dS of a pair of tiles. A thread may read its own elements at once,
/// other threads after a barrier.
template <class Compute, bool kOwnKeys>
__device__ inline void fill_matrix(const TilePair& pair, GradientOf of,
                                   SimtShared<Compute>& shared) {
  // Scores pass through shared memory, so that the rules are a loop over elements and not many
  // copies of it.
  Compute* const scores = shared.slabs;
  if (of != GradientOf::kWeights) {
    if constexpr (kOwnKeys) {
      dot_products(pair.v(), pair.dout(), shared.slabs, shared.matrix);
    } else {
      dot_products(pair.dout(), pair.v(), shared.slabs, shared.matrix);
    }
  }
  if constexpr (kOwnKeys) {
    dot_products(pair.k(), pair.q(), shared.slabs, scores);
  } else {
    dot_products(pair.q(), pair.k(), shared.slabs, scores);
  }
  const ThreadPlace<Compute> place;
  const Sequence& sequence = pair.sequence();
  const RowStats<Compute>* stats =
      stats_of<Compute>(pair.params, pair.head, pair.params.row_starts[pair.index]);
#pragma unroll 1
  for (int i = 0; i < SimtShape<Compute>::kElements; ++i) {
    const int own = place.own(i / 4);
    const int other = place.other(i % 4);
    const int at = place.at(i / 4, i % 4);
    const std::int64_t token = pair.token_begin() + (kOwnKeys ? other : own);
    const std::int64_t key = pair.key_begin() + (kOwnKeys ? own : other);
    Compute value = -Compute{0};
    if (token < sequence.query_len) {
      const Compute dweight = of == GradientOf::kWeights ? Compute{0} : shared.matrix[at];
      const ScoreGradient<Compute> gradient =
          score_gradient(pair.params.call.rules, sequence, QueryRow{token, pair.head}, key,
                         scores[at], dweight, stats[token]);
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

}  // namespace ladon::cuda::backward
