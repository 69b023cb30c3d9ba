#include "plot/curve_chart.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "units.h"

namespace ladon::cli {
namespace {

constexpr double kWidth = 720;
constexpr double kHeight = 440;
constexpr Box kFrame{72, 84, 470, 290};
constexpr std::array<Color, 6> kColors = {Color{0x1f, 0x6f, 0xb4}, Color{0xd9, 0x5f, 0x0e},
                                          Color{0x2c, 0x8c, 0x4a}, Color{0x8e, 0x4a, 0xa8},
                                          Color{0xb0, 0x30, 0x3c}, Color{0x4d, 0x4d, 0x4d}};

/// A round number that is at least this large: 1, 2 or 5 times a power of ten.
double round_up(double value) {
  if (!(value > 0) || !std::isfinite(value)) return 1;
  const double power = std::pow(10, std::floor(std::log10(value)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (value <= factor * power) return factor * power;
  }
  return 10 * power;
}

}  // namespace

std::unique_ptr<Canvas> draw_curve_chart(const std::filesystem::path& path,
                                         std::span<const Curve> curves, const std::string& title,
                                         const std::string& subtitle) {
  double right = 0;
  double top = 0;
  for (const Curve& curve : curves) {
    for (const Point& point : curve.points) {
      right = std::max(right, point.x);
      top = std::max(top, point.y);
    }
  }
  right = round_up(right);
  top = round_up(top);
  const auto place = [&](const Point& point) {
    return Point{kFrame.x + kFrame.width * point.x / right,
                 kFrame.y + kFrame.height * (1 - point.y / top)};
  };
  auto canvas = make_canvas(path, kWidth, kHeight);
  canvas->text({24, 32}, title, {.size = 16, .bold = true});
  canvas->text({24, 52}, subtitle, {.size = 12, .color = kGrey});
  constexpr int kLines = 5;
  for (int n = 0; n <= kLines; ++n) {
    const double share = static_cast<double>(n) / kLines;
    const Point left = place({0, share * top});
    canvas->line(left, {kFrame.x + kFrame.width, left.y}, kPaleGrey);
    canvas->text({left.x - 6, left.y + 4}, format_rate(share * top),
                 {.size = 10, .anchor = Anchor::kEnd, .color = kGrey});
    const Point below = place({share * right, 0});
    canvas->text({below.x, below.y + 16}, format_percent(share * right),
                 {.size = 10, .anchor = Anchor::kMiddle, .color = kGrey});
  }
  canvas->outline(kFrame, kGrey);
  canvas->text({kFrame.x + kFrame.width / 2, kFrame.y + kFrame.height + 36},
               "cache, compared with before", {.size = 12, .anchor = Anchor::kMiddle});
  canvas->text({24, kFrame.y + kFrame.height / 2}, "error of the output",
               {.size = 12, .anchor = Anchor::kMiddle, .upwards = true});
  double legend = kFrame.y + 8;
  for (std::size_t n = 0; n < curves.size(); ++n) {
    const Color color = kColors[n % kColors.size()];
    std::vector<Point> points = curves[n].points;
    std::sort(points.begin(), points.end(), [](Point a, Point b) { return a.x < b.x; });
    for (std::size_t i = 0; i < points.size(); ++i) {
      const Point at = place(points[i]);
      if (i > 0) canvas->line(place(points[i - 1]), at, color, 2);
      canvas->rectangle({at.x - 3, at.y - 3, 6, 6}, color);
    }
    canvas->rectangle({kFrame.x + kFrame.width + 14, legend - 6, 12, 4}, color);
    canvas->text({kFrame.x + kFrame.width + 32, legend}, curves[n].name, {.size = 11});
    legend += 18;
  }
  return canvas;
}

}  // namespace ladon::cli
