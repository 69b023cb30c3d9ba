// The backward pass on tensor cores: q, k, v and dout all f16 or all bf16, head_dim and value_dim
// up to 256 (padded with zeros to 64, to 128, to 192 and 128, or to 256), every option.
//
// A block of 4 warps owns 64 keys of dk and dv, or 64 rows of dq. Its own tiles (k and v, or q and
// dout) stay in shared memory; the tiles that it meets come in two stages by cp.async. Above 128
// columns the sums do not fit the registers of 4 warps: 8 have them, two and two with the same
// scores and each with half of the columns, so that a score costs 1.5 times as much. A warp has 16
// own rows: S = own0 other0^T and dP = own1 other1^T have own rows as M, so that P and dS are in
// the layout of an A operand when they are ready, and dk (or dq) += dS other0 and dv += P other1
// never pass through shared memory. P and dS are rounded to 16 bits for those products; sums are
// f32. With f16, P and dS of a result row are multiplied with a power of two that keeps its largest
// below 2^14, so that neither overflow nor the subnormals of f16 lose them.
//
// NaN and infinity: rows that see no key, and what is past the ends of a sequence, are loaded as
// zeros. A block that meets any other element that is not finite returns, because a weight of 0
// times NaN would be NaN, and a careful kernel computes its tile: the same products in the same
// order, so that what does not see the element keeps its bits. See backward_careful.cuh.
//
// The sums of dk and dv run over all tiles in one chain, four steps of 16 terms for each tile: a
// second set of sums does not fit the registers. Where all terms are equal, n rows may move a
// result by n / 16 * 2^-24 of itself: less than the rounding of the result up to 2^17 rows in f16
// and 2^20 in bf16. Those of dq are a chain for each block of 128 keys, or with WideDims one over
// all keys: there Hopper's kernel (hopper/backward_wide_rows.cuh) has no registers for totals.
//
// Flops for each score: 4 * head_dim + 4 * value_dim of dk and dv, 4 * head_dim + 2 * value_dim of
// dq. Limit: shared memory, 5/8 of an ldmatrix of 512 bytes for each mma, at 128 bytes a clock.
#pragma once

#include <cstdint>

#include "cuda/kernels/backward.cuh"
#include "cuda/kernels/backward_fragments.cuh"
#include "cuda/kernels/backward_tiles.cuh"

namespace ladon::cuda::backward {

static_assert(kTileRows == kTile);

/// The columns of tiles of q and k, and of v and dout, and among how many warps of a block the
/// columns of a result's row are divided.
template <int kHead, int kValue, int kOfWarps>
struct MmaDims {
  using Head = TileShape<kHead>;
  using Value = TileShape<kValue>;
  static constexpr int kHeadDim = kHead;
  static constexpr int kValueDim = kValue;
  static constexpr int kParts = kOfWarps;
  static constexpr int kThreads = kParts * kMmaThreads;
  static constexpr std::uint32_t kPairBytes = Head::kBytes + Value::kBytes;
  // Whether dq is summed in one chain over all keys, in place of one for each block of keys.
  static constexpr bool kOneChain = kHead > 192;
};
using NarrowDims = MmaDims<64, 64, 1>;
using MiddleDims = MmaDims<128, 128, 1>;
using LatentDims = MmaDims<192, 128, 2>;
using WideDims = MmaDims<256, 256, 2>;

/// Dynamic shared memory of a block, in bytes from its start.
template <class Dims, bool kFull>
struct MmaShared {
  using Parked = ParkedScores<Dims::kThreads>;
  // The rules of a full kernel need memory of their own, so it has one stage: 99 KiB at most up to
  // 128 columns, which every GPU has, and 161 KiB at most above, which the large ones have.
  static constexpr int kStages = kFull || Dims::kHeadDim > 192 ? 1 : 2;
  static constexpr std::uint32_t kOther = Dims::kPairBytes;
  static constexpr std::uint32_t kStats = kOther + kStages * Dims::kPairBytes;
  static constexpr std::uint32_t kWalk = kStats + kStages * kTile * sizeof(RowStats<float>);
  static constexpr std::uint32_t kScores = kWalk + 256;
  static constexpr std::uint32_t kBytes = kScores + (kFull ? Parked::kBytes : 0);
};

/// Tiles of keys of all KV heads, or of rows of all heads.
template <bool kOwnKeys>
__host__ __device__ constexpr std::int64_t num_result_tiles(const BackwardParams& params) {
  return kOwnKeys ? params.num_key_tiles * params.call.num_kv_heads
                  : params.num_row_tiles * params.call.num_heads;
}

/// One bit for each of the first `count` rows of a tile.
__device__ inline std::uint64_t first_rows(std::int64_t count) {
  return count >= kTile ? ~std::uint64_t{0} : (std::uint64_t{1} << count) - 1;
}

/// Loads the tiles that a block needs.
template <class T, class Dims, class Shared, bool kOwnKeys>
struct TileLoader {
  const BackwardParams& params;
  const TileWalk<kOwnKeys>& walk;
  const std::uint32_t memory;  // the address of shared memory

  /// The rows of another tile that are there, and see a key.
  __device__ std::uint64_t live_rows(const OtherTile& other) const {
    return kOwnKeys ? live_rows(other.head, other.tile)
                    : first_rows(walk.sequence.kv_len - walk.key_begin(other));
  }

  __device__ void load_own() const {
    const std::int64_t begin = walk.own_begin();
    if constexpr (kOwnKeys) {
      load_keys(begin, first_rows(walk.sequence.kv_len - begin), memory);
    } else {
      load_rows(walk.first_head, begin, live_rows(walk.first_head, walk.own_tile), memory, 0);
    }
  }
  __device__ void load(const OtherTile& other, std::uint64_t live, int stage) const {
    const std::uint32_t tiles = memory + Shared::kOther + stage * Dims::kPairBytes;
    if constexpr (kOwnKeys) {
      load_rows(other.head, walk.token_begin(other), live, tiles, stage);
    } else {
      load_keys(walk.key_begin(other), live, tiles);
    }
  }

 private:
  __device__ std::uint64_t live_rows(std::int64_t head, std::int64_t tile) const {
    return params.live_rows[head * params.num_row_tiles + walk.row_tile_start + tile];
  }

  /// q and dout of 64 rows, and their statistics.
  __device__ void load_rows(std::int64_t head, std::int64_t token_begin, std::uint64_t live,
                            std::uint32_t tiles, int stage) const {
    const AttentionParams& call = params.call;
    load_one<Dims::kHeadDim>(call.q, walk.sequence.q, head, token_begin, call.head_dim,
                             params.aligned.q, live, tiles);
    load_one<Dims::kValueDim>(call.dout, walk.sequence.dout, head, token_begin, call.value_dim,
                              params.aligned.dout, live, tiles + Dims::Head::kBytes);
    if (threadIdx.x >= kTile) return;
    const std::int64_t token = token_begin + threadIdx.x;
    const bool exists = token < walk.sequence.query_len;
    const RowStats<float>* from =
        stats_of<float>(params, head, walk.row_start + (exists ? token : 0));
    copy_async_8(memory + Shared::kStats + (stage * kTile + threadIdx.x) * sizeof(RowStats<float>),
                 from, exists ? 8 : 0);
  }

  /// k and v of 64 keys.
  __device__ void load_keys(std::int64_t key_begin, std::uint64_t live, std::uint32_t tiles) const {
    const AttentionParams& call = params.call;
    load_one<Dims::kHeadDim>(call.k, walk.sequence.k, walk.kv_head, key_begin, call.head_dim,
                             params.aligned.k, live, tiles);
    load_one<Dims::kValueDim>(call.v, walk.sequence.v, walk.kv_head, key_begin, call.value_dim,
                              params.aligned.v, live, tiles + Dims::Head::kBytes);
  }

  template <int kDim>
  __device__ static void load_one(const Operand& operand, std::int64_t offset, std::int64_t head,
                                  std::int64_t token, std::int64_t dim, bool aligned,
                                  std::uint64_t live, std::uint32_t tile) {
    const T* rows = static_cast<const T*>(operand.data) + offset + head * operand.head_stride +
                    token * operand.token_stride;
    load_tile<T, kDim, Dims::kThreads>(rows, operand.token_stride, static_cast<int>(dim), aligned,
                                       live, tile);
  }
};

/// Calls step(other tile, stage) for all tiles that the block meets, when they are in shared
/// memory.
template <int kStages, bool kOwnKeys, class Loader, class Step>
__device__ inline void for_each_tile(const TileWalk<kOwnKeys>& walk, const Loader& loader,
                                     const Step& step) {
  const std::int32_t num_steps = walk.num_steps();
  OtherTile current = walk.first();
  // The bits of live rows are read a step before the loads that need them.
  std::uint64_t live = loader.live_rows(current);
  if constexpr (kStages == 1) {
    for (std::int32_t i = 0; i < num_steps; ++i) {
      if (i > 0) __syncthreads();  // the tile before is read
      loader.load(current, live, 0);
      const OtherTile next = walk.after(current);
      if (i + 1 < num_steps) live = loader.live_rows(next);
      wait_for_all_copies();
      __syncthreads();
      step(current, 0);
      current = next;
    }
  } else {
    loader.load(current, live, 0);
    OtherTile next = walk.after(current);
    if (num_steps > 1) live = loader.live_rows(next);
    for (std::int32_t i = 0; i < num_steps; ++i) {
      const int stage = i % 2;
      wait_for_all_copies();
      __syncthreads();  // tile i is there, tile i - 1 is read
      const OtherTile later = walk.after(next);
      if (i + 1 < num_steps) {
        loader.load(next, live, 1 - stage);
        if (i + 2 < num_steps) live = loader.live_rows(later);
      }
      step(current, stage);
      current = next;
      next = later;
    }
  }
}

/// Computes and writes the tile of a walk, in the shared memory that holds it.
template <class T, class Dims, bool kFull, bool kOwnKeys, bool kCareful>
__device__ __forceinline__ void write_tile(const BackwardParams& params,
                                           const TileWalk<kOwnKeys>& walk,
                                           unsigned char* mma_memory) {
  using Shared = MmaShared<Dims, kFull>;
  using Head = typename Dims::Head;
  using Value = typename Dims::Value;
  constexpr int kHeadColumns = Dims::kHeadDim / Dims::kParts;  // of a warp's results
  constexpr int kValueColumns = Dims::kValueDim / Dims::kParts;
  const AttentionParams& call = params.call;
  const std::uint32_t memory = shared_address(mma_memory);
  // What depends on the thread is computed where it is used: the sums need the registers.
  const auto lane_of = [](auto tile) {
    return LaneOffsets<decltype(tile)::kDim>(static_cast<int>(cuda::fresh(threadIdx.x)) % 32);
  };
  const auto own_rows = [&](std::uint32_t pitch) {
    return cuda::fresh(threadIdx.x) % kMmaThreads / 32 * 16 * pitch;
  };
  const auto part = [] {
    return Dims::kParts == 1 ? 0 : static_cast<int>(cuda::fresh(threadIdx.x)) / kMmaThreads;
  };
  const auto scale = static_cast<float>(call.rules.scale);
  const TileLoader<T, Dims, Shared, kOwnKeys> loader{params, walk, memory};
  FragmentSums<T, kHeadColumns> sums;         // dk, or dq of a block of keys or of all
  FragmentSums<T, kValueColumns> value_sums;  // dv, of own keys alone
  FragmentTotals<kHeadColumns> totals;        // dq of blocks of keys, of own rows alone

  // Adds what the other rows from `first_other` on bring.
  const auto add_rows = [&](const OtherTile& other, int stage, int first_other) {
    constexpr int kTokens = kOwnKeys ? kScoreRows : kTile;
    constexpr int kKeys = kOwnKeys ? kTile : kScoreRows;
    const std::int64_t first_token = walk.token_begin(other) + (kOwnKeys ? first_other : 0);
    const std::int64_t first_key = walk.key_begin(other) + (kOwnKeys ? 0 : first_other);
    const std::uint32_t tiles = memory + Shared::kOther + stage * Dims::kPairBytes;
    const std::uint32_t rows = tiles + first_other * Head::kPitch;
    const std::uint32_t value_rows = tiles + Head::kBytes + first_other * Value::kPitch;
    const auto* stats = reinterpret_cast<const RowStats<float>*>(mma_memory + Shared::kStats) +
                        (kOwnKeys ? stage * kTile + first_other : 0);
    ScoreFragment scores;
    ScoreFragment dscores;
    VisibleScores visible = 0;
    if constexpr (kFull) {
      const typename Shared::Parked parked(mma_memory + Shared::kScores);
      dot_product_tile<T>(memory + own_rows(Head::kPitch), rows, lane_of(Head{}), scores);
      parked.park_scores(scores);
      dot_product_tile<T>(memory + Head::kBytes + own_rows(Value::kPitch), value_rows,
                          lane_of(Value{}), dscores);
      parked.park_dscores(dscores);
      visible = parked.template apply_rules<kOwnKeys>(call.rules, walk.sequence, other.head,
                                                      first_token, first_key, stats);
      parked.load_weights(scores);
      parked.load_gradients(dscores);
    } else {
      dot_product_tile<T>(memory + own_rows(Head::kPitch), rows, lane_of(Head{}), scores);
      dot_product_tile<T>(memory + Head::kBytes + own_rows(Value::kPitch), value_rows,
                          lane_of(Value{}), dscores);
      if constexpr (kCareful) {
        const Band band(call.rules, walk.sequence, first_token, first_key);
        const std::int64_t num_rows = walk.sequence.query_len - first_token;
        visible = find_visible<kOwnKeys>(scale, band, num_rows, stats, scores, dscores);
        plain_gradients<kOwnKeys>(scale, stats, scores, dscores);
        clear_hidden<kOwnKeys>(visible, num_rows, scores, dscores);
      } else {
        plain_gradients<kOwnKeys>(scale, stats, scores, dscores);
        const Band band(call.rules, walk.sequence, first_token, first_key);
        if (!band.sees_all(kTokens, kKeys)) apply_window<kOwnKeys>(band, scores, dscores);
      }
    }
    const auto add_from = [&](auto first, auto& of, const ScoreFragment& values,
                              std::uint32_t tile_rows, auto lane) {
      if constexpr (kCareful) {
        of.template add_carefully<first>(values, visible, tile_rows, lane);
      } else {
        of.template add<first>(values, tile_rows, lane);
      }
    };
    const auto add = [&](auto columns, auto& of, const ScoreFragment& values,
                         std::uint32_t tile_rows, auto lane) {
      if (Dims::kParts == 1 || part() == 0) {
        add_from(std::integral_constant<int, 0>{}, of, values, tile_rows, lane);
      } else {
        add_from(columns, of, values, tile_rows, lane);
      }
    };
    if constexpr (kOwnKeys) {
      add(std::integral_constant<int, kValueColumns % Dims::kValueDim>{}, value_sums, scores,
          value_rows, lane_of(Value{}));
    }
    add(std::integral_constant<int, kHeadColumns % Dims::kHeadDim>{}, sums, dscores, rows,
        lane_of(Head{}));
  };
  const auto add_tile = [&](const OtherTile& other, int stage) {
#pragma unroll 1
    for (int first = 0; first < kTile; first += kScoreRows) add_rows(other, stage, first);
    if constexpr (!kOwnKeys && !Dims::kOneChain) {
      if (walk.ends_block(other)) totals.take(sums);
    }
  };
  if (walk.num_steps() > 0) {
    loader.load_own();
    for_each_tile<Shared::kStages>(walk, loader, add_tile);
  }

  const Sequence& sequence = walk.sequence;
  const std::int64_t begin = walk.own_begin();
  const int head_column = part() * kHeadColumns;
  const int value_column = part() * kValueColumns;
  const int head_dim = static_cast<int>(call.head_dim) - head_column;
  const int value_dim = static_cast<int>(call.value_dim) - value_column;
  const auto start = [&](const Operand& operand, std::int64_t offset, std::int64_t head) {
    return offset + head * operand.head_stride + begin * operand.token_stride;
  };
  if constexpr (kOwnKeys) {
    const std::int64_t count = sequence.kv_len - begin;
    store_sums<T>(sums, scale, call.dk, start(call.dk, sequence.dk, walk.kv_head) + head_column,
                  count, head_dim);
    store_sums<T>(value_sums, 1.0F, call.dv,
                  start(call.dv, sequence.dv, walk.kv_head) + value_column, count, value_dim);
  } else {
    const auto& of_all_keys = first_if<Dims::kOneChain>(sums, totals);
    store_sums<T>(of_all_keys, scale, call.dq,
                  start(call.dq, sequence.dq, walk.first_head) + head_column,
                  sequence.query_len - begin, head_dim);
  }
}

template <bool kOwnKeys, class Shared>
__device__ inline TileWalk<kOwnKeys>& walk_in(unsigned char* memory) {
  static_assert(sizeof(TileWalk<kOwnKeys>) <= Shared::kScores - Shared::kWalk);
  return *reinterpret_cast<TileWalk<kOwnKeys>*>(memory + Shared::kWalk);
}

template <class Dims, bool kOwnKeys>
inline constexpr int kMmaBlocks = Dims::kParts > 1                    ? 1
                                  : Dims::kHeadDim == 64 && !kOwnKeys ? 3
                                                                      : 2;

template <class T, class Dims, bool kFull, bool kOwnKeys>
__global__ void __launch_bounds__(Dims::kThreads, kMmaBlocks<Dims, kOwnKeys>)
    mma_tile(const __grid_constant__ BackwardParams params) {
  extern __shared__ __align__(128) unsigned char mma_memory[];
  auto& walk = walk_in<kOwnKeys, MmaShared<Dims, kFull>>(mma_memory);
  walk.start(params, params.first_block + blockIdx.x);
  if (meets_non_finite(params, walk)) return;
  write_tile<T, Dims, kFull, kOwnKeys, false>(params, walk, mma_memory);
}

/// The tiles that mma_tile() left out: each block takes every gridDim.x-th of all tiles.
template <class T, class Dims, bool kFull, bool kOwnKeys>
__global__ void __launch_bounds__(Dims::kThreads, 1)
    careful_mma_tiles(const __grid_constant__ BackwardParams params) {
  extern __shared__ __align__(128) unsigned char mma_memory[];
  if (*params.any_not_finite == 0) return;
  auto& walk = walk_in<kOwnKeys, MmaShared<Dims, kFull>>(mma_memory);
  const std::int64_t count = num_result_tiles<kOwnKeys>(params);
  for (std::int64_t i = blockIdx.x; i < count; i += gridDim.x) {
    __syncthreads();  // the walk before is over
    walk.start(params, i);
    if (!meets_non_finite(params, walk)) continue;
    write_tile<T, Dims, kFull, kOwnKeys, true>(params, walk, mma_memory);
  }
}

/// Calls launch(dims, full) with the types of a call.
template <class Launch>
inline void with_mma_shape(const AttentionParams& call, const Launch& launch) {
  const bool full = !only_scale_and_window(call.rules);
  const auto with_dims = [&](auto dims) {
    full ? launch(dims, std::true_type{}) : launch(dims, std::false_type{});
  };
  const std::int64_t widest = std::max(call.head_dim, call.value_dim);
  if (widest <= 64) return with_dims(NarrowDims{});
  if (widest <= 128) return with_dims(MiddleDims{});
  if (call.head_dim <= 192 && call.value_dim <= 128) return with_dims(LatentDims{});
  with_dims(WideDims{});
}

/// Launches a block for each tile of keys of a KV head, or of rows of a head.
template <class T, bool kOwnKeys>
inline void launch_mma(Queue& queue, const BackwardParams& params) {
  with_mma_shape(params.call, [&](auto dims, auto full) {
    using Dims = decltype(dims);
    constexpr bool kFull = decltype(full)::value;
    launch_blocks(queue, mma_tile<T, Dims, kFull, kOwnKeys>, num_result_tiles<kOwnKeys>(params),
                  Dims::kThreads, MmaShared<Dims, kFull>::kBytes, params);
  });
}

/// There is nothing left out as a rule, so a few blocks look for it.
template <class T, bool kOwnKeys>
inline void launch_careful_mma(Queue& queue, const BackwardParams& params) {
  const std::int64_t blocks =
      std::min<std::int64_t>(num_result_tiles<kOwnKeys>(params), 2 * queue.num_multiprocessors());
  with_mma_shape(params.call, [&](auto dims, auto full) {
    using Dims = decltype(dims);
    constexpr bool kFull = decltype(full)::value;
    launch_blocks(queue, careful_mma_tiles<T, Dims, kFull, kOwnKeys>, blocks, Dims::kThreads,
                  MmaShared<Dims, kFull>::kBytes, params);
  });
}

}  // namespace ladon::cuda::backward
