// Results of tensor cores to global memory, 16 bytes at a time: in the registers of a product, the
// four lanes of a row have two neighbouring columns of each eight.
#pragma once

#include <cstdint>

namespace ladon::cuda {

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

/// 16 bytes to global memory in one instruction, which the compiler does not always make of a
/// uint4.
__device__ inline void store_chunk(void* to, const std::uint32_t (&words)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

}  // namespace ladon::cuda
