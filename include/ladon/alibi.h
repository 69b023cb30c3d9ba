// ALiBi: attention with linear biases, which adds -slope * distance to a score (Press, Smith and
// Lewis, "Train short, test long", 2022). attention() and MultiHeadAttention take any slopes; this
// gives the ones that models are trained with.
#pragma once

#include <cstdint>
#include <vector>

#include "ladon/export.h"

namespace ladon {

/// One slope for each of num_heads heads. For a power of two, n: 2^(-8/n), 2^(-16/n), ... 2^-8. For
/// other numbers: those of the power of two below, then the 1st, 3rd, 5th, ... of the power of two
/// above.
LADON_API std::vector<double> alibi_slopes(std::int64_t num_heads);

}  // namespace ladon
