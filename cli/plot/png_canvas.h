// Pictures as PNG: shapes and letters are drawn into pixels.
#pragma once

#include "plot/canvas.h"

namespace ladon::cli {

class PngCanvas final : public Canvas {
 public:
  PngCanvas(double width, double height);
  void rectangle(const Box& box, Color fill) override;
  void line(Point from, Point to, Color color, double thickness) override;
  void text(Point at, std::string_view words, const TextStyle& style) override;
  void image(const Box& box, const Image& image) override;
  std::string bytes() const override;

 private:
  void blend(int x, int y, Color color, double part);
  /// A line with round ends, its edges smoothed. In pixels.
  void stroke(Point from, Point to, Color color, double thickness);

  Image pixels_;
};

}  // namespace ladon::cli
