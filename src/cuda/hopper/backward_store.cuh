// Results of Hopper's backward kernel to global memory, 16 bytes at a time where rows are aligned
// to them.
#pragma once

#include "cuda/kernels/backward_fragments.cuh"

namespace ladon::cuda::hopper {

/// Each of the four lanes that share a row has a word of four chunks; lane t gets all words of
/// chunk t. A transposition, by one bit of the lane and of the chunk at a time.
__device__ inline void gather_chunk(std::uint32_t (&words)[4]) {
#pragma unroll
  for (unsigned bit = 1; bit < 4; bit *= 2) {
    const bool has_bit = (threadIdx.x & bit) != 0;
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) {
      if ((i & bit) != 0) continue;
      std::uint32_t& low = words[i];
      std::uint32_t& high = words[i | bit];
      const std::uint32_t got =
          __shfl_xor_sync(0xffffffffU, has_bit ? low : high, static_cast<int>(bit));
      (has_bit ? low : high) = got;
    }
  }
}

/// 16 bytes to global memory in one instruction, which the compiler does not make of a uint4 here.
__device__ inline void store_chunk(std::uint16_t* to, const std::uint32_t (&words)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
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
      gather_chunk(words);
      const int column = (first + static_cast<int>(threadIdx.x) % 4) * 8;
      if (row >= num_rows || column >= dim) continue;
      store_chunk(rows + row * operand.token_stride + column, words);
    }
  }
}

}  // namespace ladon::cuda::hopper
