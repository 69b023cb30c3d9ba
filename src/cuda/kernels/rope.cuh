// The arithmetic of rotary position embedding (rope.cu): angles, and pairs of a head's elements as
// a thread loads, rotates and stores them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "core/integer.h"
#include "core/rope_params.h"
#include "cuda/kernels/chunk.cuh"

namespace ladon::cuda {

// Pairs whose cosines and sines are in shared memory at a time.
inline constexpr int kTilePairs = 256;

__device__ inline float product(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double product(double a, double b) { return __dmul_rn(a, b); }

/// Both at once, of any double, with full range reduction.
struct Rotation {
  double cos;
  double sin;
};
__device__ inline Rotation rotation_by(double angle) {
  Rotation rotation;
  sincos(angle, &rotation.sin, &rotation.cos);
  return rotation;
}

/// Of a position, stretched by the rope's magnitude.
__device__ inline Rotation rotation_at(const RopeParams& rope, std::int64_t position,
                                       double frequency) {
  Rotation rotation = rotation_by(product(static_cast<double>(position), frequency));
  rotation.cos *= rope.magnitude;
  rotation.sin *= rope.magnitude;
  return rotation;
}

__device__ inline std::int64_t pairs_of(const RopeParams& rope) { return rope.rotary_dim / 2; }

/// The first and second elements of 8 pairs.
template <class Compute>
struct Pairs {
  Chunk<Compute> first;
  Chunk<Compute> second;
};

template <class Compute>
__device__ inline void rotate_pairs(Pairs<Compute>& pairs, const Compute* cos, const Compute* sin) {
#pragma unroll
  for (int n = 0; n < kChunk; ++n) {
    const Compute a = pairs.first.values[n];
    const Compute b = pairs.second.values[n];
    pairs.first.values[n] = product(a, cos[n]) - product(b, sin[n]);
    pairs.second.values[n] = product(a, sin[n]) + product(b, cos[n]);
  }
}

/// Pairs [n, n + count) of the head that starts at `start`. Interleaved ones are 16 consecutive
/// elements, of which even and odd ones change places in registers.
template <class Compute>
__device__ inline Pairs<Compute> load_pairs(const RopeParams& rope, const void* x,
                                            std::int64_t start, std::int64_t n, int count) {
  const auto load = [&](std::int64_t i, int elements) {
    return load_chunk<Compute>(x, rope.dtype, start + i, elements);
  };
  if (!rope.interleaved) return {load(n, count), load(n + pairs_of(rope), count)};
  const int elements = 2 * count;
  const Chunk<Compute> low = load(2 * n, min(elements, kChunk));
  const Chunk<Compute> high = load(2 * n + kChunk, max(elements - kChunk, 0));
  Pairs<Compute> pairs;
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) {
    pairs.first.values[i] = low.values[2 * i];
    pairs.second.values[i] = low.values[2 * i + 1];
    pairs.first.values[i + kChunk / 2] = high.values[2 * i];
    pairs.second.values[i + kChunk / 2] = high.values[2 * i + 1];
  }
  return pairs;
}

template <class Compute>
__device__ inline void store_pairs(const RopeParams& rope, void* out, std::int64_t start,
                                   std::int64_t n, int count, const Pairs<Compute>& pairs) {
  const auto store = [&](std::int64_t i, int elements, const Chunk<Compute>& chunk) {
    store_chunk(out, rope.dtype, start + i, elements, chunk);
  };
  if (!rope.interleaved) {
    store(n, count, pairs.first);
    store(n + pairs_of(rope), count, pairs.second);
    return;
  }
  Chunk<Compute> low;
  Chunk<Compute> high;
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) {
    low.values[2 * i] = pairs.first.values[i];
    low.values[2 * i + 1] = pairs.second.values[i];
    high.values[2 * i] = pairs.first.values[i + kChunk / 2];
    high.values[2 * i + 1] = pairs.second.values[i + kChunk / 2];
  }
  const int elements = 2 * count;
  store(2 * n, min(elements, kChunk), low);
  store(2 * n + kChunk, max(elements - kChunk, 0), high);
}

/// For all threads of a block: calls rotate(head, pair, count, cos, sin) with every chunk of
/// `count` pairs of a token's heads, and the cosines and sines of them, rotation_of(pair). Blocks
/// of one token (grid.y) share its heads. wait() is called between the two.
template <class Compute, class RotationOf, class Rotate, class Wait>
__device__ inline void rotate_heads(const RopeParams& rope, std::int64_t heads,
                                    const RotationOf& rotation_of, const Rotate& rotate,
                                    const Wait& wait) {
  __shared__ Compute cos[kTilePairs];
  __shared__ Compute sin[kTilePairs];
  for (std::int64_t tile = 0; tile < pairs_of(rope); tile += kTilePairs) {
    const int pairs = static_cast<int>(min(pairs_of(rope) - tile, std::int64_t{kTilePairs}));
    __syncthreads();  // the previous tile is done with
    for (int n = threadIdx.x; n < pairs; n += blockDim.x) {
      const Rotation rotation = rotation_of(tile + n);
      cos[n] = static_cast<Compute>(rotation.cos);
      sin[n] = static_cast<Compute>(rotation.sin);
    }
    wait();
    __syncthreads();
    const auto chunks = static_cast<unsigned>((pairs + kChunk - 1) / kChunk);
    const auto items = static_cast<unsigned>(heads) * chunks;  // a token's elements are far fewer
    for (unsigned item = blockIdx.y * blockDim.x + threadIdx.x; item < items;
         item += gridDim.y * blockDim.x) {
      const int n = static_cast<int>(item % chunks) * kChunk;
      rotate(item / chunks, tile + n, min(pairs - n, kChunk), cos + n, sin + n);
    }
  }
}

// ---- launches -----------------------------------------------------------------------------------

/// Whether the same positions of tokens are rotated alike, by frequencies.
bool has_same_angles(const RopeParams& a, const RopeParams& b);

/// Of host memory; empty where there are none.
inline std::span<const double> frequencies_of(const RopeParams& params) {
  if (params.cos.data != nullptr) return {};
  return {params.frequencies, static_cast<std::size_t>(params.pairs())};
}

/// Threads of a block that has a token: enough for its heads or its angles, in whole warps.
inline unsigned threads_for_token(const RopeParams& params, std::int64_t heads, int most) {
  const std::int64_t items = std::max(heads * ceil_div(params.pairs(), kChunk), params.pairs());
  return static_cast<unsigned>(std::clamp<std::int64_t>(ceil_div(items, 32) * 32, 32, most));
}

/// Blocks that share the heads of a token where there are few tokens: each computes its angles
/// again.
inline unsigned blocks_for_token(const RopeParams& params, std::int64_t heads,
                                 std::int64_t tokens) {
  constexpr std::int64_t kFewTokens = 16;
  if (tokens > kFewTokens) return 1;
  return static_cast<unsigned>(
      std::clamp<std::int64_t>(heads * ceil_div(params.pairs(), kChunk) / 64, 1, 8));
}

}  // namespace ladon::cuda
