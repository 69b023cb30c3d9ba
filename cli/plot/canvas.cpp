#include "plot/canvas.h"

#include "failure.h"
#include "plot/png_canvas.h"
#include "plot/svg_canvas.h"
#include "standard_streams.h"

namespace ladon::cli {

void Canvas::outline(const Box& box, Color color, double thickness) {
  const Point top_left{box.x, box.y};
  const Point top_right{box.x + box.width, box.y};
  const Point bottom_left{box.x, box.y + box.height};
  const Point bottom_right{box.x + box.width, box.y + box.height};
  line(top_left, top_right, color, thickness);
  line(top_right, bottom_right, color, thickness);
  line(bottom_right, bottom_left, color, thickness);
  line(bottom_left, top_left, color, thickness);
}

void check_picture_path(std::string_view option, const std::filesystem::path& path) {
  if (is_standard_output(path.string())) return;
  const std::filesystem::path extension = path.extension();
  if (extension == ".svg" || extension == ".png") return;
  throw UsageError(std::string(option) + ": '" + path.string() +
                   "' is no picture's name: expected one that ends in .svg or .png");
}

std::unique_ptr<Canvas> make_canvas(const std::filesystem::path& path, double width,
                                    double height) {
  if (path.extension() == ".svg" || is_standard_output(path.string()))
    return std::make_unique<SvgCanvas>(width, height);
  return std::make_unique<PngCanvas>(width, height);
}

}  // namespace ladon::cli
