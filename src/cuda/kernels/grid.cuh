// How work is divided among blocks and threads: grid sizes, and loops that any grid completes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/integer.h"

namespace ladon::cuda {

/// Threads of a block where a kernel has no reason for another number: eight blocks fill a
/// multiprocessor.
inline constexpr int kThreads = 256;

/// Blocks for so many items. At most what a grid's x can hold: kernels loop over the rest.
inline unsigned blocks_for(std::int64_t items, std::int64_t items_per_block) {
  constexpr std::int64_t kMostBlocks = (std::int64_t{1} << 31) - 1;
  return static_cast<unsigned>(std::min(ceil_div(items, items_per_block), kMostBlocks));
}

/// Calls function(i) for each i in [0, count), one thread each. Blocks and grid are
/// one-dimensional.
template <class Function>
__device__ inline void for_each_index(std::int64_t count, const Function& function) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    function(i);
  }
}

}  // namespace ladon::cuda
