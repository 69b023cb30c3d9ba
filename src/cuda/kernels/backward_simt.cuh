// The second half of the backward pass with plain FMA: P or dS times rows of q, k or dout, summed
// into a result tile. backward_simt_scores.cuh says how the work is divided.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/kernels/backward_simt_scores.cuh"

namespace ladon::cuda::backward {

inline constexpr int kFoldTiles = 64;  // tiles whose sums are added before they are folded

/// sums[own][column] += matrix^T times a slab of 64 columns, skipping what is masked.
template <class Compute>
__device__ inline void add_matrix_product(const Compute* matrix, const Compute* slab,
                                          ThreadTile<Compute>& sums) {
  using Shape = SimtShape<Compute>;
  const ThreadPlace<Compute> place;
  ThreadTile<Compute> products = {};
#pragma unroll 2
  for (int other = 0; other < kTile; ++other) {
    Compute right[4];
    load_four(slab + other * Shape::kPitch + 4 * place.x, right);
#pragma unroll
    for (int a = 0; a < Shape::kOwn; a += 4) {
      Compute left[4];
      load_four(matrix + other * Shape::kPitch + Shape::kOwn * place.y + a, left);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (is_masked(left[i])) continue;
#pragma unroll
        for (int b = 0; b < 4; ++b) products[a + i][b] = fma(left[i], right[b], products[a + i][b]);
      }
    }
  }
  add_tile<Compute>(products, sums);
}

/// The sums of a result tile: since the last fold in registers, up to it in shared memory.
template <class Compute>
class ResultSums {
 public:
  using Shape = SimtShape<Compute>;

  __device__ explicit ResultSums(Compute* folded) : folded_(folded + threadIdx.x) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) folded_[i * Shape::kThreads] = 0;
  }

  /// Adds matrix^T times columns [first_column, first_column + kColumns) of the rows of `right`.
  __device__ void add(const RowSource& right, std::int32_t first_column,
                      SimtShared<Compute>& shared) {
#pragma unroll
    for (int group = 0; group < Shape::kGroups; ++group) {
      const std::int32_t column = first_column + group * kTile;
      if (column >= right.dim) continue;
      __syncthreads();  // the matrix is there, the slab before is read
      load_slab<kTile>(right, column, Shape::kPitch, shared.slabs);
      __syncthreads();
      add_matrix_product<Compute>(shared.matrix, shared.slabs, recent_[group]);
    }
  }

  /// Moves the sums since the last fold to shared memory.
  __device__ void fold() {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      Compute& recent = recent_[i / Shape::kElements][i % Shape::kElements / 4][i % 4];
      folded_[i * Shape::kThreads] += recent;
      recent = 0;
    }
  }

  /// Calls store(own row, column of the tile, sum) for all elements of this thread, after a fold.
  template <class Store>
  __device__ void for_each(const Store& store) const {
    const ThreadPlace<Compute> place;
#pragma unroll 1
    for (int i = 0; i < kSums; ++i) {
      store(Shape::kOwn * place.y + i % Shape::kElements / 4,
            kTile * (i / Shape::kElements) + 4 * place.x + i % 4, folded_[i * Shape::kThreads]);
    }
  }

 private:
  static constexpr int kSums = Shape::kGroups * Shape::kElements;

  Compute* const folded_;
  ThreadTile<Compute> recent_[Shape::kGroups] = {};
};

/// The operand that P or dS are multiplied with.
template <bool kOwnKeys>
__device__ inline RowSource right_operand(const TilePair& pair, GradientOf of) {
  if constexpr (kOwnKeys) {
    return of == GradientOf::kWeights ? pair.dout() : pair.q();
  } else {
    return pair.k();
  }
}

/// Computes and writes one part, of kColumns columns, of a tile of dq, dk or dv.
template <class Compute, bool kOwnKeys>
__device__ inline void write_result_tile(const BackwardParams& params,
                                         const TileWalk<kOwnKeys>& walk, GradientOf of,
                                         std::int32_t part, SimtShared<Compute>& shared) {
  const std::int32_t first_column = part * SimtShape<Compute>::kColumns;
  const AttentionParams& call = params.call;
  // Read again where it is needed, rather than kept in registers.
  const Sequence& sequence = call.sequences[walk.index];
  ResultSums<Compute> sums(shared.folded);
  OtherTile other = walk.first();
  for (std::int32_t step = 0; step < walk.num_steps(); ++step, other = walk.after(other)) {
    if (step % kFoldTiles == 0) sums.fold();
    const TilePair pair{params, walk.index, other.head, kOwnKeys ? other.tile : walk.own_tile,
                        kOwnKeys ? walk.own_tile : other.tile};
    fill_matrix<Compute, kOwnKeys>(pair, of, shared);
    sums.add(right_operand<kOwnKeys>(pair, of), first_column, shared);
  }
  const bool of_weights = of == GradientOf::kWeights;
  const Operand& result = !kOwnKeys ? call.dq : of_weights ? call.dv : call.dk;
  const std::int64_t offset = !kOwnKeys ? sequence.dq : of_weights ? sequence.dv : sequence.dk;
  const std::int64_t head = kOwnKeys ? walk.kv_head : walk.first_head;
  const std::int64_t dim = of_weights ? call.value_dim : call.head_dim;
  const std::int64_t count = (kOwnKeys ? sequence.kv_len : sequence.query_len) - walk.own_begin();
  const std::int64_t start =
      offset + head * result.head_stride + walk.own_begin() * result.token_stride;
  const Compute scale = of_weights ? Compute{1} : static_cast<Compute>(call.rules.scale);
  sums.fold();
  sums.for_each([&](int row, int column_of_tile, Compute sum) {
    const std::int32_t column = first_column + column_of_tile;
    if (row >= count || column >= dim) return;
    store_element(result.data, result.dtype, start + row * result.token_stride + column,
                  sum * scale);
  });
}

/// Blocks that a result of `dim` columns needs for each of its tiles.
template <class Compute>
__host__ __device__ constexpr std::int32_t column_parts(const Operand& result, std::int64_t dim) {
  constexpr std::int64_t kColumns = SimtShape<Compute>::kColumns;
  return result.data == nullptr ? 0 : static_cast<std::int32_t>((dim + kColumns - 1) / kColumns);
}

/// Calls write(walk, part) for the block's share of all parts of all result tiles.
template <bool kOwnKeys, class Compute, class Write>
__device__ inline void for_each_result_tile(const BackwardParams& params, std::int64_t count,
                                            std::int64_t num_tiles, SimtShared<Compute>& shared,
                                            const Write& write) {
  auto& walk = *reinterpret_cast<TileWalk<kOwnKeys>*>(shared.walk);
  static_assert(sizeof walk <= sizeof shared.walk);
  for (std::int64_t i = params.first_block + blockIdx.x; i < count; i += gridDim.x) {
    __syncthreads();  // the walk before is over
    walk.start(params, i % num_tiles);
    write(walk, static_cast<std::int32_t>(i / num_tiles));
  }
}

template <class Compute>
inline void launch_result_tiles(Queue& queue, void (*kernel)(BackwardParams),
                                std::int64_t num_tiles, std::int32_t parts,
                                const BackwardParams& params) {
  constexpr std::int64_t kMostBlocks = std::int64_t{1} << 30;
  launch_blocks(queue, kernel, std::min(num_tiles * parts, kMostBlocks),
                SimtShape<Compute>::kThreads, sizeof(SimtShared<Compute>), params);
}

}  // namespace ladon::cuda::backward
