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
/// Of 2048 keys: what Hopper's decode kernel of heads above 128 is written for.
constexpr SegmentSize long_segments() { return {5}; }

/// Short segments give multiprocessors enough to share when one sequence is decoded. In prefill
/// each ends with a fold, which costs the more the longer a head's values are: heads of 256 run at
/// 460 TFLOP/s with segments of 512 keys, at 550 with 1024 and at 630 with 2048 (H200, bf16, 16384
/// causal tokens). Heads of 129 to 256 columns of keys or values therefore have 2048. Latents keep
/// short segments: they are decoded above all. A row's bits depend on the size, which may therefore
/// depend on nothing that differs between prefill, chunks, decoding and training, or between ranks
/// that share the heads. For tensor cores over 16-bit keys and values: quantised caches, f32 and
/// f64, whose forward gains less than their decoding would lose, have short segments.
constexpr SegmentSize segment_size_of(std::int64_t head_dim, std::int64_t value_dim) {
  const std::int64_t columns = head_dim > value_dim ? head_dim : value_dim;
  return columns > 128 && columns <= 256 ? long_segments() : short_segments();
}

}  // namespace ladon::cuda
