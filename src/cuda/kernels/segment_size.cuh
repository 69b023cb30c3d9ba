// How long the segments of keys are; softmax_state.cuh says what they are for.
#pragma once

#include <cstdint>

namespace ladon::cuda {

inline constexpr int kBlockKeys = 64;

/// Blocks and segments are counted from the sequence's first token.
struct SegmentSize {
  std::int8_t log2_blocks;

  constexpr int blocks() const { return 1 << log2_blocks; }
  constexpr int of_block(int block) const { return block >> log2_blocks; }
  constexpr int of_key(std::int64_t key) const {
    return of_block(static_cast<int>(key / kBlockKeys));
  }
  constexpr int begin(int segment) const { return segment << log2_blocks; }
  constexpr int end_after(int block) const { return begin(of_block(block) + 1); }
};

/// Of 512 keys: what kernels of heads up to 128, and of latents, are written for.
constexpr SegmentSize short_segments() { return {3}; }

/// Short segments give multiprocessors enough to share when one sequence is decoded. In prefill
/// each ends with a fold, so longer ones are faster: 2048 keys for MLA's expanded heads, whose
/// layers have 64 heads or more and decode over latents, with absorbed heads of another size. A
/// row's bits depend on the size, which may therefore depend on nothing that differs between
/// prefill, chunks, decoding and training, or between ranks that share the heads.
constexpr SegmentSize segment_size_of(std::int64_t head_dim, std::int64_t value_dim) {
  const bool is_expanded = head_dim > 128 && head_dim <= 192 && value_dim <= 128;
  return is_expanded ? SegmentSize{5} : short_segments();
}

}  // namespace ladon::cuda
