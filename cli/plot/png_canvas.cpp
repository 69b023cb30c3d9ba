#include "plot/png_canvas.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "plot/png.h"
#include "plot/stroke_font.h"

namespace ladon::cli {
namespace {

constexpr double kScale = 2;  // pixels for each unit

std::uint8_t mix(std::uint8_t below, std::uint8_t above, double part) {
  return static_cast<std::uint8_t>(std::lround(below + part * (above - below)));
}

/// How much of [position, position + 1) is in [begin, end).
double covered(int position, double begin, double end) {
  return std::clamp(std::min(end, position + 1.0) - std::max(begin, static_cast<double>(position)),
                    0.0, 1.0);
}

double distance_to_segment(Point p, Point a, Point b) {
  const double dx = b.x - a.x;
  const double dy = b.y - a.y;
  const double square = dx * dx + dy * dy;
  const double t =
      square == 0 ? 0 : std::clamp(((p.x - a.x) * dx + (p.y - a.y) * dy) / square, 0.0, 1.0);
  return std::hypot(p.x - a.x - t * dx, p.y - a.y - t * dy);
}

}  // namespace

PngCanvas::PngCanvas(double width, double height) {
  pixels_.width = static_cast<int>(std::lround(width * kScale));
  pixels_.height = static_cast<int>(std::lround(height * kScale));
  pixels_.pixels.assign(
      static_cast<std::size_t>(pixels_.width) * static_cast<std::size_t>(pixels_.height), kWhite);
}

void PngCanvas::blend(int x, int y, Color color, double part) {
  if (x < 0 || y < 0 || x >= pixels_.width || y >= pixels_.height || part <= 0) return;
  Color& pixel =
      pixels_.pixels[static_cast<std::size_t>(y) * static_cast<std::size_t>(pixels_.width) +
                     static_cast<std::size_t>(x)];
  pixel = {mix(pixel.red, color.red, part), mix(pixel.green, color.green, part),
           mix(pixel.blue, color.blue, part)};
}

void PngCanvas::rectangle(const Box& box, Color fill) {
  const double left = box.x * kScale;
  const double right = (box.x + box.width) * kScale;
  const double top = box.y * kScale;
  const double bottom = (box.y + box.height) * kScale;
  for (int y = static_cast<int>(std::floor(top)); y < bottom; ++y) {
    for (int x = static_cast<int>(std::floor(left)); x < right; ++x) {
      blend(x, y, fill, covered(x, left, right) * covered(y, top, bottom));
    }
  }
}

void PngCanvas::line(Point from, Point to, Color color, double thickness) {
  // Most lines are straight up or across: as rectangles they keep sharp edges.
  const double half = thickness / 2;
  if (from.x == to.x || from.y == to.y) {
    const double left = std::min(from.x, to.x) - half;
    const double top = std::min(from.y, to.y) - half;
    rectangle({left, top, std::abs(to.x - from.x) + thickness, std::abs(to.y - from.y) + thickness},
              color);
    return;
  }
  stroke({from.x * kScale, from.y * kScale}, {to.x * kScale, to.y * kScale}, color,
         thickness * kScale);
}

void PngCanvas::stroke(Point from, Point to, Color color, double thickness) {
  const double reach = thickness / 2 + 1;
  const int left = static_cast<int>(std::floor(std::min(from.x, to.x) - reach));
  const int right = static_cast<int>(std::ceil(std::max(from.x, to.x) + reach));
  const int top = static_cast<int>(std::floor(std::min(from.y, to.y) - reach));
  const int bottom = static_cast<int>(std::ceil(std::max(from.y, to.y) + reach));
  for (int y = top; y <= bottom; ++y) {
    for (int x = left; x <= right; ++x) {
      const double away = distance_to_segment({x + 0.5, y + 0.5}, from, to);
      blend(x, y, color, std::clamp(thickness / 2 - away + 0.5, 0.0, 1.0));
    }
  }
}

void PngCanvas::text(Point at, std::string_view words, const TextStyle& style) {
  const double unit = style.size * kScale / kFontUnitsPerSize;
  const double width = stroke_width(words) * unit;
  double start = 0;
  if (style.anchor == Anchor::kMiddle) start = -width / 2;
  if (style.anchor == Anchor::kEnd) start = -width;
  const double thickness = style.size * kScale * (style.bold ? 0.13 : 0.085);
  const auto place = [&](Point p) {
    const double along = start + p.x * unit;
    const double down = p.y * unit;
    const Point origin{at.x * kScale, at.y * kScale};
    return style.upwards ? Point{origin.x + down, origin.y - along}
                         : Point{origin.x + along, origin.y + down};
  };
  for (const Segment& segment : stroke_segments(words)) {
    stroke(place(segment.from), place(segment.to), style.color, thickness);
  }
}

void PngCanvas::image(const Box& box, const Image& image) {
  const double cell_width = box.width / image.width;
  const double cell_height = box.height / image.height;
  // To whole pixels, so that neighbours neither overlap nor leave a seam.
  const auto snap = [](double value) { return std::round(value * kScale) / kScale; };
  for (int row = 0; row < image.height; ++row) {
    for (int column = 0; column < image.width; ++column) {
      const double left = snap(box.x + column * cell_width);
      const double top = snap(box.y + row * cell_height);
      const double right = snap(box.x + (column + 1) * cell_width);
      const double bottom = snap(box.y + (row + 1) * cell_height);
      const std::size_t index =
          static_cast<std::size_t>(row) * static_cast<std::size_t>(image.width) +
          static_cast<std::size_t>(column);
      rectangle({left, top, right - left, bottom - top}, image.pixels[index]);
    }
  }
}

std::string PngCanvas::bytes() const { return encode_png(pixels_); }

}  // namespace ladon::cli
