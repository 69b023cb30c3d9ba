#pragma once

#include <cstdint>

#include "ladon/convert.h"

namespace ladon::convert {

/// num_kv_heads must be a multiple of the layer's, and divide its num_heads.
MultiHeadAttention repeat_kv_heads(const Context& context, const MultiHeadAttention& layer,
                                   std::int64_t num_kv_heads);

}  // namespace ladon::convert
