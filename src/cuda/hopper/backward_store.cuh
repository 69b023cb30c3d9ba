// Results of Hopper's backward kernel to global memory, 16 bytes at a time where rows are aligned
// to them.
#pragma once

#include "cuda/kernels/backward_fragments.cuh"

namespace ladon::cuda::hopper {

/// Each of the four lanes that share a row has a word of four chunks; lane t gets all words of
/// chunk t.
__device__ inline uint4 gather_chunk(const std::uint32_t (&words)[4]) {
  const unsigned lane = threadIdx.x % 4;
  std::uint32_t chunk[4];
#pragma unroll
  for (unsigned distance = 0; distance < 4; ++distance) {
    const unsigned to = (lane + distance) % 4;
    const unsigned from = (lane - distance) % 4;
    const std::uint32_t sent = to == 0   ? words[0]
                               : to == 1 ? words[1]
                               : to == 2 ? words[2]
                                         : words[3];
    const std::uint32_t got = __shfl_sync(0xffffffffU, sent, static_cast<int>(from), 4);
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) {
      // The first goes everywhere: words that the compiler took for those of the chunk before would
      // be kept until then.
      chunk[i] = distance == 0 || from == i ? got : chunk[i];
    }
  }
  return make_uint4(chunk[0], chunk[1], chunk[2], chunk[3]);
}

/// The same as store_sums(). For all lanes of a warp.
template <class Half, class Sums>
__device__ __forceinline__ void store_rows(const Sums& sums, float factor, const Operand& operand,
                                           std::int64_t start, std::int64_t num_rows, int dim) {
  constexpr int kGroups = sizeof(sums.sums) / sizeof(sums.sums[0]);
  auto* const rows = static_cast<std::uint16_t*>(operand.data) + start;
  const bool is_aligned = operand.dtype != DType::kF32 && dim % 8 == 0 &&
                          operand.token_stride % 8 == 0 &&
                          reinterpret_cast<std::uintptr_t>(rows) % 16 == 0;
  if (operand.data == nullptr || !is_aligned) {
    return backward::store_sums<Half>(sums, factor, operand, start, num_rows, dim);
  }
  const backward::FragmentPlace place;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = place.own(2 * half);
    const float row_factor = sums.factor(half);
#pragma unroll
    for (int first = 0; first < kGroups; first += 4) {
      std::uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&from)[4] = sums.sums[first + i];
        words[i] = pack<Half>(from[2 * half] * row_factor * factor,
                              from[2 * half + 1] * row_factor * factor);
      }
      const uint4 chunk = gather_chunk(words);
      const int column = (first + static_cast<int>(threadIdx.x) % 4) * 8;
      if (row >= num_rows || column >= dim) continue;
      *reinterpret_cast<uint4*>(rows + row * operand.token_stride + column) = chunk;
    }
  }
}

}  // namespace ladon::cuda::hopper
