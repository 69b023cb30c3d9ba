// The picture of `ladon compare`: three bar charts side by side.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "layer_measure.h"
#include "plot/canvas.h"

namespace ladon::cli {

struct CompareChartText {
  std::string title;
  std::string machine;
  std::string work;
};

/// Prefill and decoding speed with this machine's ceiling above each bar, and cache bytes per
/// token.
std::unique_ptr<Canvas> draw_compare_chart(const std::filesystem::path& path,
                                           std::span<const LayerMeasurement> rows,
                                           const CompareChartText& text);

}  // namespace ladon::cli
