// Tokens out of a cache: contiguous rows, dequantised.
#pragma once

#include <cstddef>

#include "ladon/context.h"
#include "ladon/kv_cache_view.h"
#include "ladon/tensor_view.h"

namespace ladon {

/// The keys and the values that one sequence of a cache holds, oldest first: [length, num_kv_heads
/// * dim] each, of any float dtype, on the cache's device. Absent ones are not wanted.
void gather_sequence(const Context& context, const KvCacheView& cache, std::size_t sequence,
                     const TensorView& keys, const TensorView& values);

}  // namespace ladon
