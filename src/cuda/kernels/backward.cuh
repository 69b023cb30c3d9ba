// What the kernels of the backward pass share: how sequences are cut into tiles, which tiles meet,
// and the gradient of one score.
//
//   P  = exp(rules(scale * q k^T) - lse)          dP = dout v^T
//   dS = P * (dP - delta),   delta = rowsum(dout * out) - dlse
//   dv = P^T dout,   dk = scale * dS^T q,   dq = scale * dS k
//
// Every block owns a tile of one result, 64 keys of dk and dv or 64 rows of dq, and walks over the
// tiles that its tile meets: keys over rows in ascending order, rows over blocks of 128 keys, the
// last first. Nothing is added by two blocks, so no sum needs atomics, and the order of each is
// fixed by the sequence alone. Scores are computed twice, by the owners of keys and by the owners
// of rows: 7 products in place of 5. Hopper's kernel for heads up to 192 (hopper/backward.cuh)
// needs 5 for the same bits; the order of dq is the one in which its blocks finish under a causal
// mask.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/kernels/attention_rules.cuh"
#include "cuda/queue.h"

namespace ladon::cuda::backward {

/// Keys or query rows in a tile. Rows of a tile have one head.
inline constexpr int kTile = 64;
/// Tiles of keys whose contributions to dq are summed from zero, and then added to those before.
inline constexpr int kBlockTiles = 2;

/// What a row brings to all of its scores. Rows that see no key have lse = +inf and delta = 0.
template <class Compute>
struct alignas(2 * sizeof(Compute)) RowStats {
  Compute lse;
  Compute delta;
};

/// Which operands have 16-byte aligned rows.
struct AlignedRows {
  bool q = false;
  bool k = false;
  bool v = false;
  bool dout = false;
};

/// One call, as every kernel of the backward pass sees it. Lists by sequence have one entry more
/// than there are sequences: the total.
struct BackwardParams {
  AttentionParams call;  // with device pointers
  AlignedRows aligned;
  std::int64_t first_block = 0;                   // of this launch
  const std::int64_t* row_starts = nullptr;       // [sequence] rows before it
  const std::int64_t* row_tile_starts = nullptr;  // [sequence] tiles of rows before it
  const std::int64_t* key_tile_starts = nullptr;  // [sequence] tiles of keys before it
  std::int64_t num_rows = 0;                      // of all sequences
  std::int64_t num_row_tiles = 0;
  std::int64_t num_key_tiles = 0;
  void* stats = nullptr;  // RowStats [head][row]
  // For tensor cores, whose products would spread the NaN of a masked element. Null where they are
  // not used.
  std::uint64_t* live_rows = nullptr;       // [head][row tile] one bit for each row that sees a key
  std::uint8_t* rows_not_finite = nullptr;  // [head][row tile] 1 where q or dout have such a row
  std::uint8_t* keys_not_finite = nullptr;  // [KV head][key tile]
  unsigned* any_not_finite = nullptr;       // 1 where any of them is
  // For blocks that take tile after tile: of the first launch that uses one, and of the second. 0
  // before.
  unsigned* next_ticket = nullptr;
  // Whether lse or delta of a row that sees a key is not finite where q has such an element: each
  // score of the row is then NaN or infinite, and lse is of those scores alone.
  bool lse_shows_q = false;
};

/// An element in the compute type.
template <class Compute, class Storage>
__device__ inline Compute widened(Storage x) {
  if constexpr (sizeof(Storage) == 8) {
    return static_cast<Compute>(x);
  } else {
    return static_cast<Compute>(to_float(x));
  }
}

template <class Compute>
__device__ inline const RowStats<Compute>* stats_of(const BackwardParams& params, std::int64_t head,
                                                    std::int64_t row) {
  return static_cast<const RowStats<Compute>*>(params.stats) + head * params.num_rows + row;
}

/// The sequence that holds an item, where starts[s] items come before sequence s.
__device__ inline std::int64_t sequence_of(const std::int64_t* starts, std::int64_t num_sequences,
                                           std::int64_t item) {
  std::int64_t low = 0;
  std::int64_t high = num_sequences;
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    (starts[middle] <= item ? low : high) = middle;
  }
  return low;
}

/// Tiles [begin, end) of a sequence.
struct TileRange {
  std::int32_t begin = 0;
  std::int32_t end = 0;
};
__device__ inline TileRange tiles_around(std::int64_t begin, std::int64_t end) {
  if (begin >= end) return {};
  return {static_cast<std::int32_t>(begin / kTile),
          static_cast<std::int32_t>((end + kTile - 1) / kTile)};
}

/// The tiles of keys that some row of a tile may see by its window.
__device__ inline TileRange key_tiles_seen(const ScoreRules& rules, const Sequence& sequence,
                                           std::int64_t row_tile) {
  const std::int64_t first = row_tile * kTile;
  const std::int64_t next = first + kTile;
  const std::int64_t last = (next < sequence.query_len ? next : sequence.query_len) - 1;
  return tiles_around(window_of(rules, sequence, first).begin,
                      window_of(rules, sequence, last).end);
}

/// The tiles of rows that may see some key of a tile.
__device__ inline TileRange row_tiles_seeing(const ScoreRules& rules, const Sequence& sequence,
                                             std::int64_t key_tile) {
  const std::int64_t first = key_tile * kTile;
  const std::int64_t next = first + kTile;
  const std::int64_t last = (next < sequence.kv_len ? next : sequence.kv_len) - 1;
  const std::int64_t begin = first - rules.window_right - sequence.position_offset;
  const std::int64_t end = last + rules.window_left - sequence.position_offset + 1;
  return tiles_around(begin < 0 ? 0 : begin, end < sequence.query_len ? end : sequence.query_len);
}

/// A tile that a block's own tile meets: of rows of a head, or of keys.
struct OtherTile {
  std::int32_t head;  // the query head of the pair
  std::int32_t tile;
};

/// The tile that a block owns and the tiles that it meets. Keys meet the rows of all heads of their
/// group, head by head. Counts of tiles fit 32 bits: their rows' statistics would fill the memory.
/// Lives in shared memory, because the products need the registers.
template <bool kOwnKeys>
struct TileWalk {
  std::int32_t index;  // of the sequence
  Sequence sequence;
  std::int64_t row_start;       // of the sequence, among all rows
  std::int32_t row_tile_start;  // of the sequence, among all tiles
  std::int32_t key_tile_start;
  std::int32_t own_tile;
  std::int32_t kv_head;
  std::int32_t first_head;
  std::int32_t num_heads;  // that own keys meet
  TileRange others;

  /// Blocks of one head follow each other, so that they share what they read in the L2 cache. Tiles
  /// of rows come last first: under a causal mask those have the most to do. For all threads of the
  /// block.
  __device__ void start(const BackwardParams& params, std::int64_t block) {
    if (threadIdx.x == 0) {
      const std::int64_t num_tiles = kOwnKeys ? params.num_key_tiles : params.num_row_tiles;
      const std::int64_t in_head = block % num_tiles;
      const std::int64_t tile = kOwnKeys ? in_head : num_tiles - 1 - in_head;
      const std::int64_t* starts = kOwnKeys ? params.key_tile_starts : params.row_tile_starts;
      const std::int64_t holder = sequence_of(starts, params.call.num_sequences, tile);
      set(params, holder, tile - starts[holder], block / num_tiles);
    }
    __syncthreads();
  }

  /// A tile of a sequence, and the KV head or head that owns it.
  __device__ void set(const BackwardParams& params, std::int64_t holder, std::int64_t tile,
                      std::int64_t owner) {
    const AttentionParams& call = params.call;
    index = static_cast<std::int32_t>(holder);
    sequence = call.sequences[index];
    row_start = params.row_starts[index];
    row_tile_start = static_cast<std::int32_t>(params.row_tile_starts[index]);
    key_tile_start = static_cast<std::int32_t>(params.key_tile_starts[index]);
    own_tile = static_cast<std::int32_t>(tile);
    kv_head = static_cast<std::int32_t>(kOwnKeys ? owner : owner / call.group);
    first_head = static_cast<std::int32_t>(kOwnKeys ? owner * call.group : owner);
    num_heads = kOwnKeys ? static_cast<std::int32_t>(call.group) : 1;
    others = kOwnKeys ? row_tiles_seeing(call.rules, sequence, own_tile)
                      : key_tiles_seen(call.rules, sequence, own_tile);
  }

  __device__ std::int32_t num_steps() const { return (others.end - others.begin) * num_heads; }
  __device__ OtherTile first() const {
    return {first_head, kOwnKeys ? others.begin : first_of_block((others.end - 1) / kBlockTiles)};
  }
  __device__ OtherTile after(OtherTile other) const {
    if constexpr (kOwnKeys) {
      if (++other.tile == others.end) return {other.head + 1, others.begin};
    } else {
      if (ends_block(other)) return {other.head, first_of_block(other.tile / kBlockTiles - 1)};
      ++other.tile;
    }
    return other;
  }
  /// Whether the tile is the last of its block of keys.
  __device__ bool ends_block(const OtherTile& other) const {
    return other.tile + 1 == others.end || (other.tile + 1) % kBlockTiles == 0;
  }
  __device__ std::int32_t first_of_block(std::int32_t block) const {
    return max(others.begin, block * kBlockTiles);
  }
  /// The first token or key of the own tile.
  __device__ std::int64_t own_begin() const { return std::int64_t{own_tile} * kTile; }
  __device__ std::int64_t token_begin(const OtherTile& other) const {
    return std::int64_t{kOwnKeys ? other.tile : own_tile} * kTile;
  }
  __device__ std::int64_t key_begin(const OtherTile& other) const {
    return std::int64_t{kOwnKeys ? own_tile : other.tile} * kTile;
  }
};

/// Whether a tile meets an element of q, k, v or dout that is NaN or infinite: the answers of
/// `threads` threads, each for a part of what it meets.
template <bool kOwnKeys>
__device__ inline bool finds_non_finite(const BackwardParams& params,
                                        const TileWalk<kOwnKeys>& walk, int thread, int threads) {
  const std::uint8_t* rows =
      params.rows_not_finite + walk.first_head * params.num_row_tiles + walk.row_tile_start;
  const std::uint8_t* keys =
      params.keys_not_finite + walk.kv_head * params.num_key_tiles + walk.key_tile_start;
  int found = kOwnKeys ? keys[walk.own_tile] : rows[walk.own_tile];
  const std::uint8_t* others = kOwnKeys ? rows : keys;
  // Hopper's kernel multiplies rows with whole blocks of keys.
  const std::int32_t begin =
      kOwnKeys ? walk.others.begin : walk.others.begin / kBlockTiles * kBlockTiles;
  const std::int32_t end =
      kOwnKeys ? walk.others.end
               : min((walk.others.end + kBlockTiles - 1) / kBlockTiles * kBlockTiles,
                     static_cast<std::int32_t>((walk.sequence.kv_len + kTile - 1) / kTile));
  for (std::int32_t head = 0; head < walk.num_heads; ++head, others += params.num_row_tiles) {
    for (std::int32_t tile = begin + thread; tile < end; tile += threads) found |= others[tile];
  }
  return found != 0;
}
/// The same for all threads of the block, which must all call it.
template <bool kOwnKeys>
__device__ inline bool meets_non_finite(const BackwardParams& params,
                                        const TileWalk<kOwnKeys>& walk) {
  const bool found =
      finds_non_finite(params, walk, static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x));
  return __syncthreads_or(found ? 1 : 0) != 0;
}

/// The weight of a visible key and the gradients of its score. Nothing where it is masked.
template <class Compute>
struct ScoreGradient {
  bool visible = false;
  Compute weight = 0;  // dropout applied
  Compute biased = 0;  // gradient of the biased score
  Compute scaled = 0;  // gradient of scale * q.k
};

/// An exponent of a weight, held at 1/16: weights are at most 1, and a little more by rounding.
/// Huge scores round otherwise here than in the forward pass, and their difference from lse may be
/// anything. NaN stays.
__device__ inline double held_exponent(double exponent) {
  return exponent > 0.0625 ? 0.0625 : exponent;
}
__device__ inline float held_exponent(float exponent) {
  float held;
  asm("min.NaN.f32 %0, %1, 0f3d800000;" : "=f"(held) : "f"(exponent));
  return held;
}

/// `dot` is q.k, `dweight` is dout.v. Neither is used where the key is masked.
template <class Compute>
__device__ inline ScoreGradient<Compute> score_gradient(const ScoreRules& rules,
                                                        const Sequence& sequence,
                                                        const QueryRow& row, std::int64_t key,
                                                        Compute dot, Compute dweight,
                                                        const RowStats<Compute>& stats) {
  const Compute infinity = static_cast<Compute>(INFINITY);
  const Softcapped<Compute> capped = softcapped(rules, static_cast<Compute>(rules.scale) * dot);
  const Compute score = masked_score(rules, sequence, row, key, capped.score);
  const bool sees_nothing = stats.lse == infinity && stats.delta == 0;
  if (score == -infinity || sees_nothing) return {};
  const Compute probability = exp(held_exponent(score - stats.lse));
  const Compute keep = dropout_factor<Compute>(rules, sequence, row, key);
  const Compute biased = probability * (dweight * keep - stats.delta);
  return {true, probability * keep, biased, biased * capped.slope};
}

/// Launches any number of blocks; the kernel adds params.first_block to its block's index.
inline void launch_blocks(Queue& queue, void (*kernel)(BackwardParams), std::int64_t blocks,
                          int threads, std::size_t shared_bytes, BackwardParams params) {
  constexpr std::int64_t kMostBlocks = std::int64_t{1} << 30;
  for (std::int64_t first = 0; first < blocks; first += kMostBlocks) {
    params.first_block = first;
    const auto count = static_cast<unsigned>(std::min(kMostBlocks, blocks - first));
    queue.launch(kernel, Grid{dim3(count), dim3(static_cast<unsigned>(threads)), shared_bytes},
                 params);
  }
}

// The launches, each in the file of its kernel. They write the results that are present.
void zero_padding(Queue& queue, const BackwardParams& params, std::int64_t most_padding);
void prepare_rows(Queue& queue, const BackwardParams& params);
/// For tensor cores; Hopper's kernel for heads up to 192 does this by itself.
void prepare_keys(Queue& queue, const BackwardParams& params);
void simt_dkdv(Queue& queue, const BackwardParams& params);
void simt_dq(Queue& queue, const BackwardParams& params);
/// Shared memory of a block on tensor cores, in bytes. Heads are at most kMmaLongestHead long.
inline constexpr std::int64_t kMmaLongestHead = 256;
std::size_t mma_shared_bytes(const AttentionParams& call);
void mma_dkdv(Queue& queue, const BackwardParams& params);
void mma_dq(Queue& queue, const BackwardParams& params);
// The tiles that mma_dkdv() and mma_dq() leave out.
void careful_mma_dkdv(Queue& queue, const BackwardParams& params);
void careful_mma_dq(Queue& queue, const BackwardParams& params);
void bias_gradient(Queue& queue, const BackwardParams& params);
void sink_gradient(Queue& queue, const BackwardParams& params);

}  // namespace ladon::cuda::backward
