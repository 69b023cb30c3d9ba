#include "plot/canvas.h"

#include "failure.h"
#ifdef LADON_WITH_CAIRO
#include "plot/cairo_canvas.h"
#endif
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

void check_picture_path(std::string_view option, const std::filesystem::path& path, bool pages) {
  const std::filesystem::path extension = path.extension();
  if (pages && extension == ".html") return;
  if (is_standard_output(path.string()) || extension == ".svg") return;
#ifdef LADON_WITH_CAIRO
  if (extension == ".png" || extension == ".pdf") return;
  const std::string expected = pages ? ".svg, .png, .pdf or .html" : ".svg, .png or .pdf";
#else
  const std::string expected = std::string(pages ? ".svg or .html" : ".svg") +
                               " (this build has no Cairo, which draws .png and .pdf)";
#endif
  throw UsageError(std::string(option) + ": cannot draw '" + path.string() +
                   "': expected a name that ends in " + expected);
}

std::unique_ptr<Canvas> make_canvas([[maybe_unused]] const std::filesystem::path& path,
                                    double width, double height) {
#ifdef LADON_WITH_CAIRO
  if (path.extension() == ".png") return make_cairo_canvas(CairoFormat::kPng, width, height);
  if (path.extension() == ".pdf") return make_cairo_canvas(CairoFormat::kPdf, width, height);
#endif
  return std::make_unique<SvgCanvas>(width, height);
}

}  // namespace ladon::cli
