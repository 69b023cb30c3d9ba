// Results of Hopper's backward kernel to global memory, 16 bytes at a time where rows are aligned
// to them.
#pragma once

#include "cuda/kernels/backward_fragments.cuh"
#include "cuda/kernels/row_chunks.cuh"

namespace ladon::cuda::hopper {

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
      gather_chunk(words);
      const int column = (first + static_cast<int>(threadIdx.x) % 4) * 8;
      if (row >= num_rows || column >= dim) continue;
      store_chunk(rows + row * operand.token_stride + column, words);
    }
  }
}

}  // namespace ladon::cuda::hopper
