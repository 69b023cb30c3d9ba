// Attention weights as a picture: one panel for each head.
#pragma once

#include <memory>
#include <string>

#include "ladon/tensor_view.h"
#include "plot/canvas.h"

namespace ladon::cli {

struct HeatMapTitle {
  std::string title;
  std::string subtitle;
};

/// `weights` is [num_heads, query_len, kv_len], f32 and dense, numbers in [0, 1]. The colour goes
/// with the square root of a weight, or all but the largest would look like 0. Long sequences are
/// drawn in cells of several tokens, each as dark as its largest weight.
std::unique_ptr<Canvas> draw_heat_map(const std::filesystem::path& path,
                                      const ConstTensorView& weights, const HeatMapTitle& title);

}  // namespace ladon::cli
