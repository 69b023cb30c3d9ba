// Curves of the error over the cache, as a sweep of conversions measures them.
#pragma once

#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "plot/canvas.h"

namespace ladon::cli {

struct Curve {
  std::string name;
  std::vector<Point> points;  // x: share of the cache; y: the error
};

std::unique_ptr<Canvas> draw_curve_chart(const std::filesystem::path& path,
                                         std::span<const Curve> curves, const std::string& title,
                                         const std::string& subtitle);

}  // namespace ladon::cli
