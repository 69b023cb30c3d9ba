// Random inputs of the benchmark, in less time than fill_normal() takes.
#pragma once

#include <cstdint>

#include "ladon/context.h"
#include "ladon/tensor_view.h"

namespace ladon::bench {

/// Fills a contiguous view with normal numbers: 4 million are drawn, and repeated where there are
/// more. Drawing 270 million, for the largest case, takes seconds; what is timed does not depend on
/// it.
void fill_with_normal(const Context& context, const TensorView& view, std::uint64_t seed,
                      std::uint64_t stream = 0);

}  // namespace ladon::bench
