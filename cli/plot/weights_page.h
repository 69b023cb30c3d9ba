// Attention weights as one HTML page to explore: no network, no other files.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ladon/tensor_view.h"
#include "plot/heat_map.h"

namespace ladon::cli {

/// The page's bytes. `weights` is [num_heads, query_len, kv_len], f32 and dense; `picture` says
/// what else there is to show. Weights are kept in 8 bits, by their square root: a weight of 1 is
/// exact to 0.4 %, one of 0.01 to 4 %.
std::string weights_page(const ConstTensorView& weights, const HeatMapText& picture);

}  // namespace ladon::cli
