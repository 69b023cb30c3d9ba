// What the forward kernels share: their params, and which keys a tile of query rows needs.
#pragma once

#include <cstdint>

#include "core/attention_params.h"
#include "cuda/kernels/softmax_state.cuh"

namespace ladon::cuda {

/// Sequences whose lists need no upload.
inline constexpr std::int64_t kFewSequences = 8;

template <class Compute>
struct ForwardParams {
  AttentionParams call;  // on the device; without `sequences` where they are here:
  Sequence few[kFewSequences];
  Partials<Compute> partials;
  std::int64_t row_tiles = 0;     // of the longest sequence
  std::int64_t value_chunks = 0;  // columns of V are shared out among blocks of threads
  // Tensor-core kernels only. exp2(factor * difference) is exp() of a difference of scores;
  // `natural` brings a score to natural units.
  float factor = 1;
  float natural = 1;
  // What results are multiplied by in the end: f16 has no room for weights that dropout made
  // larger.
  float kept_factor = 1;
  bool only_scales = false;  // of int8 caches: no rules beyond a positive scale and a window
  bool aligned_q = false;    // rows can be read 16 bytes at a time
  bool aligned_k = false;
  bool aligned_v = false;
  bool aligned_out = false;  // rows can be written so
  // All kernels. A param, because it would spill registers to work it out.
  SegmentSize segment_size = short_segments();
  // Tiles that a faster kernel could not compute, because they have infinities or NaN: whether
  // there are any, then a flag for each tile of [sequence, kv_head, row_tile].
  int* unfinished = nullptr;
  // With Partials: the first so many segments of a sequence are one task, which folds them and
  // leaves the result as that of the last of them.
  std::int64_t folded = 1;
};

/// Whether a call needs the generic tensor-core kernels that read queries from shared memory and
/// the size of segments from params: the others are written for heads up to 128 and short segments.
inline bool is_streamed(const ForwardParams<float>& params) {
  return params.call.head_dim > 128 ||
         params.segment_size.log2_blocks != short_segments().log2_blocks;
}

/// For kernels of few rows and no rules but a window: all others have the call's sequences on the
/// device.
template <class Compute>
__device__ inline const Sequence& sequence_of(const ForwardParams<Compute>& params,
                                              std::int64_t index) {
  const Sequence* const uploaded = params.call.sequences;
  return (uploaded != nullptr ? uploaded : params.few)[index];
}

/// Which part of a call a block of threads computes.
struct ForwardTask {
  std::int64_t sequence = 0;
  std::int64_t kv_head = 0;
  std::int64_t value_chunk = 0;
  std::int64_t row_tile = 0;
  // With Partials only: the first, counted from the segment of key 0, and how many.
  std::int64_t segment = 0;
  std::int64_t num_segments = 1;

  __device__ ForwardTask(std::int64_t of_sequence, std::int64_t of_kv_head, std::int64_t first)
      : sequence(of_sequence), kv_head(of_kv_head), segment(first) {}

  /// Long tiles of causal calls come first: the last blocks of a launch are then short. There are
  /// fewer than 2^31 tasks, and divisions of 64 bits take a microsecond in all; but with 32 bits
  /// (Index) the compiler spills registers of forward_simt.cuh.
  template <class Compute, class Index>
  __device__ ForwardTask(const ForwardParams<Compute>& params, Index block) {
    const auto row_tiles = static_cast<Index>(params.row_tiles);
    const auto value_chunks = static_cast<Index>(params.value_chunks);
    const auto kv_heads = static_cast<Index>(params.call.num_kv_heads);
    const Index segments =
        params.partials.maximum == nullptr ? 1 : static_cast<Index>(params.partials.segments);
    if (params.folded > 1) {
      // These are the longest.
      const auto folded = static_cast<Index>(params.folded);
      const Index tiles =
          static_cast<Index>(params.call.num_sequences) * kv_heads * value_chunks * row_tiles;
      if (block < tiles) {
        num_segments = folded;
      } else {
        block -= tiles;
        segment = folded + block % (segments - folded);
        block /= segments - folded;
      }
    } else {
      segment = block % segments;
      block /= segments;
    }
    row_tile = row_tiles - 1 - block % row_tiles;
    block /= row_tiles;
    value_chunk = block % value_chunks;
    block /= value_chunks;
    kv_head = block % kv_heads;
    sequence = block / kv_heads;
  }
};

/// Rows of a tile: those of `heads` neighbouring query heads, token by token.
struct RowHeads {
  int first = 0;
  int heads = 1;

  /// Mostly without a division.
  __device__ QueryRow query_of(int row) const {
    if (heads == 1) return {row, first};
    return {row / heads, first + row % heads};
  }
};

/// Whether this is one of so many rows; a tile may have others before and behind them.
__device__ __forceinline__ bool is_row(int row, int rows) {
  return static_cast<unsigned>(row) < static_cast<unsigned>(rows);
}

/// Blocks of keys, counted from the sequence's first token, so that they are cut at the same places
/// whether or not a window has dropped tokens.
struct BlockRange {
  int begin = 0;
  int end = 0;
};

/// The blocks that queries [first_token, last_token] see. Windows move with the token, so the first
/// token's begins first and the last token's ends last.
__device__ inline BlockRange visible_blocks(const ScoreRules& rules, const Sequence& sequence,
                                            std::int64_t first_token, std::int64_t last_token) {
  const std::int64_t begin = window_of(rules, sequence, first_token).begin;
  const std::int64_t end = window_of(rules, sequence, last_token).end;
  if (begin >= end) return {};
  return {static_cast<int>((begin + sequence.key_origin) / kBlockKeys),
          static_cast<int>((end - 1 + sequence.key_origin) / kBlockKeys) + 1};
}

/// The blocks of which all those queries see every key.
__device__ inline BlockRange whole_blocks(const ScoreRules& rules, const Sequence& sequence,
                                          std::int64_t first_token, std::int64_t last_token) {
  const std::int64_t begin = window_of(rules, sequence, last_token).begin;
  const std::int64_t end = window_of(rules, sequence, first_token).end;
  if (begin >= end) return {};
  return {static_cast<int>((begin + sequence.key_origin + kBlockKeys - 1) / kBlockKeys),
          static_cast<int>((end + sequence.key_origin) / kBlockKeys)};
}

/// Those of them that are in one segment, or in `count` of them.
__device__ inline BlockRange blocks_in_segment(SegmentSize size, const Sequence& sequence,
                                               const BlockRange& blocks, std::int64_t segment,
                                               std::int64_t count = 1) {
  const int begin = size.begin(size.of_key(sequence.key_origin) + static_cast<int>(segment));
  const int end = begin + static_cast<int>(count) * size.blocks();
  const BlockRange both{blocks.begin > begin ? blocks.begin : begin,
                        blocks.end < end ? blocks.end : end};
  return both.begin < both.end ? both : BlockRange{};
}

}  // namespace ladon::cuda
