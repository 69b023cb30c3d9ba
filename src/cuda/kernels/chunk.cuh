// Eight consecutive elements of a row in one thread's registers: what kernels over rows load,
// compute with and store at a time.
//
// 16 bytes travel at once where the address allows it, else element by element. Which elements a
// thread has does not depend on that, so strides and alignment change no bit of a result.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/kernels/element.cuh"

namespace ladon::cuda {

inline constexpr int kChunk = 8;

template <class Compute>
struct Chunk {
  Compute values[kChunk];
};

/// Elements of the chunk that starts at `index` of a row of `dim`: 8, or fewer at its end.
__device__ inline int chunk_count(std::int64_t dim, std::int64_t index) {
  return dim - index < kChunk ? static_cast<int>(dim - index) : kChunk;
}

__device__ inline bool is_aligned(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % sizeof(uint4) == 0;
}

/// Moves up to 16 bytes of elements.
template <class Bits>
__device__ inline void move_elements(Bits* to, const Bits* from, int count) {
  if (count == static_cast<int>(sizeof(uint4) / sizeof(Bits)) && is_aligned(from) &&
      is_aligned(to)) {
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
  } else {
    for (int n = 0; n < count; ++n) to[n] = from[n];
  }
}

/// A stored element as a number to compute with.
template <class Compute, class Stored>
__device__ inline Compute widened(Stored stored) {
  if constexpr (std::is_same_v<Stored, double>) {
    return static_cast<Compute>(stored);
  } else {
    return static_cast<Compute>(to_float(stored));
  }
}

/// Zeros past `count`.
template <class Compute, class Stored>
__device__ inline Chunk<Compute> load_chunk_of(const Stored* from, int count) {
  constexpr int kWords = kChunk * sizeof(Stored) / sizeof(uint4);
  Chunk<Compute> chunk;
  if (count == kChunk && is_aligned(from)) {
    uint4 words[kWords];
#pragma unroll
    for (int n = 0; n < kWords; ++n) words[n] = reinterpret_cast<const uint4*>(from)[n];
    Stored stored[kChunk];
    memcpy(stored, words, sizeof stored);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) chunk.values[i] = widened<Compute>(stored[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      chunk.values[i] = i < count ? widened<Compute>(from[i]) : Compute{0};
    }
  }
  return chunk;
}

template <class Compute, class Stored>
__device__ inline void store_chunk_of(Stored* to, int count, const Chunk<Compute>& chunk) {
  constexpr int kWords = kChunk * sizeof(Stored) / sizeof(uint4);
  if (count == kChunk && is_aligned(to)) {
    Stored stored[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) stored[i] = rounded<Stored>(chunk.values[i]);
    uint4 words[kWords];
    memcpy(words, stored, sizeof stored);
    // An intrinsic, because the compiler cuts a plain store up to share pieces with the other
    // branch.
#pragma unroll
    for (int n = 0; n < kWords; ++n) __stwb(reinterpret_cast<uint4*>(to) + n, words[n]);
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if (i < count) to[i] = rounded<Stored>(chunk.values[i]);
    }
  }
}

/// `count` elements from `index` on of a float array, as numbers of the type float or double; zeros
/// past them.
template <class Compute>
__device__ inline Chunk<Compute> load_chunk(const void* data, DType dtype, std::int64_t index,
                                            int count) {
  return with_storage_type(dtype, [&](auto zero) {
    return load_chunk_of<Compute>(static_cast<const decltype(zero)*>(data) + index, count);
  });
}

/// Stores the first `count` elements of a chunk, each rounded once.
template <class Compute>
__device__ inline void store_chunk(void* data, DType dtype, std::int64_t index, int count,
                                   const Chunk<Compute>& chunk) {
  with_storage_type(dtype, [&](auto zero) {
    store_chunk_of(static_cast<decltype(zero)*>(data) + index, count, chunk);
  });
}

}  // namespace ladon::cuda
