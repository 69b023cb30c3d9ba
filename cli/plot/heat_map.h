// Attention weights as a picture: one panel for each head.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ladon/tensor_view.h"
#include "plot/canvas.h"

namespace ladon::cli {

/// What is said and known about the weights.
struct HeatMapText {
  std::string title;
  std::string subtitle;
  /// What no query may see: keys after it, keys `window` or more before it (0: no window).
  bool causal = false;
  std::int64_t window = 0;
  std::vector<std::string> tokens{};  // texts of the tokens; empty: numbers alone
  std::vector<std::int64_t> heads{};  // the number of each head that is drawn

  bool is_masked(std::int64_t query, std::int64_t key) const {
    return (causal && key > query) || (window > 0 && query - key >= window);
  }
};

/// Texts of more tokens than this do not fit a picture.
inline constexpr std::int64_t kMostTokenTexts = 64;

/// `weights` is [num_heads, query_len, kv_len], f32 and dense, values in [0, 1]. The colour goes
/// with the square root of a weight, or all but the largest would look like 0; what is masked has
/// a separate colour. Long sequences are drawn in cells of several tokens, each as dark as its
/// largest weight.
std::unique_ptr<Canvas> draw_heat_map(const std::filesystem::path& path,
                                      const ConstTensorView& weights, const HeatMapText& text);

}  // namespace ladon::cli
