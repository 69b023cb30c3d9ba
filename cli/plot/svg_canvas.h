// Pictures as SVG.
#pragma once

#include "plot/canvas.h"

namespace ladon::cli {

class SvgCanvas final : public Canvas {
 public:
  SvgCanvas(double width, double height);
  void rectangle(const Box& box, Color fill) override;
  void line(Point from, Point to, Color color, double thickness) override;
  void text(Point at, std::string_view words, const TextStyle& style) override;
  /// As a PNG inside the SVG where Cairo can make one; else as rectangles, which can be megabytes.
  void image(const Box& box, const Image& image) override;
  std::string bytes() const override;

 private:
  std::string text_;
};

}  // namespace ladon::cli
