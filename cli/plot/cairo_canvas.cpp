#include "plot/cairo_canvas.h"

#include <cairo-pdf.h>
#include <cairo.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <numbers>

#include "failure.h"

namespace ladon::cli {
namespace {

constexpr double kScale = 2;  // a PNG's pixels for each unit

void check(cairo_status_t status) {
  if (status == CAIRO_STATUS_SUCCESS) return;
  throw Failure(std::string("cannot draw a picture: Cairo says: ") +
                cairo_status_to_string(status));
}

cairo_status_t append(void* to, const unsigned char* data, unsigned size) {
  static_cast<std::string*>(to)->append(reinterpret_cast<const char*>(data), size);
  return CAIRO_STATUS_SUCCESS;
}

/// Owns a surface.
struct Surface {
  explicit Surface(cairo_surface_t* made) : handle(made) { check(cairo_surface_status(handle)); }
  ~Surface() { cairo_surface_destroy(handle); }
  Surface(const Surface&) = delete;
  Surface& operator=(const Surface&) = delete;
  cairo_surface_t* handle;
};

/// The pixels in Cairo's order.
void fill_pixels(const Surface& surface, const Image& image) {
  unsigned char* const data = cairo_image_surface_get_data(surface.handle);
  const int stride = cairo_image_surface_get_stride(surface.handle);
  for (int y = 0; y < image.height; ++y) {
    for (int x = 0; x < image.width; ++x) {
      const Color color =
          image.pixels[static_cast<std::size_t>(y) * static_cast<std::size_t>(image.width) +
                       static_cast<std::size_t>(x)];
      const std::uint32_t pixel = std::uint32_t{color.red} << 16U |
                                  std::uint32_t{color.green} << 8U | std::uint32_t{color.blue};
      std::memcpy(
          data + static_cast<std::ptrdiff_t>(y) * stride + 4 * static_cast<std::ptrdiff_t>(x),
          &pixel, sizeof pixel);
    }
  }
  cairo_surface_mark_dirty(surface.handle);
}

cairo_surface_t* new_image(int width, int height) {
  return cairo_image_surface_create(CAIRO_FORMAT_RGB24, width, height);
}

class CairoCanvas final : public Canvas {
 public:
  CairoCanvas(CairoFormat format, double width, double height)
      : format_(format),
        surface_(format == CairoFormat::kPdf
                     ? cairo_pdf_surface_create_for_stream(append, &pdf_, width, height)
                     : new_image(static_cast<int>(std::lround(width * kScale)),
                                 static_cast<int>(std::lround(height * kScale)))),
        context_(cairo_create(surface_.handle)) {
    check(cairo_status(context_));
    if (format == CairoFormat::kPng) cairo_scale(context_, kScale, kScale);
    cairo_set_line_cap(context_, CAIRO_LINE_CAP_SQUARE);
    rectangle({0, 0, width, height}, kWhite);
  }
  ~CairoCanvas() override { cairo_destroy(context_); }
  CairoCanvas(const CairoCanvas&) = delete;
  CairoCanvas& operator=(const CairoCanvas&) = delete;

  void rectangle(const Box& box, Color fill) override {
    use(fill);
    cairo_rectangle(context_, box.x, box.y, box.width, box.height);
    cairo_fill(context_);
  }

  void line(Point from, Point to, Color color, double thickness) override {
    use(color);
    cairo_set_line_width(context_, thickness);
    cairo_move_to(context_, from.x, from.y);
    cairo_line_to(context_, to.x, to.y);
    cairo_stroke(context_);
  }

  void text(Point at, std::string_view words, const TextStyle& style) override {
    const std::string copy(words);
    cairo_save(context_);
    use(style.color);
    cairo_select_font_face(context_, "sans-serif", CAIRO_FONT_SLANT_NORMAL,
                           style.bold ? CAIRO_FONT_WEIGHT_BOLD : CAIRO_FONT_WEIGHT_NORMAL);
    // The system's sans-serif letters are usually a tenth wider than the SVG's Helvetica.
    cairo_set_font_size(context_, 0.92 * style.size);
    cairo_text_extents_t extents{};
    cairo_text_extents(context_, copy.c_str(), &extents);
    cairo_move_to(context_, at.x, at.y);
    if (style.upwards) cairo_rotate(context_, -std::numbers::pi / 2);
    const double before = style.anchor == Anchor::kStart    ? 0
                          : style.anchor == Anchor::kMiddle ? extents.x_advance / 2
                                                            : extents.x_advance;
    cairo_rel_move_to(context_, -before, 0);
    cairo_show_text(context_, copy.c_str());
    cairo_restore(context_);
  }

  void image(const Box& box, const Image& image) override {
    const Surface pixels(new_image(image.width, image.height));
    fill_pixels(pixels, image);
    cairo_save(context_);
    cairo_translate(context_, box.x, box.y);
    cairo_scale(context_, box.width / image.width, box.height / image.height);
    cairo_set_source_surface(context_, pixels.handle, 0, 0);
    cairo_pattern_set_filter(cairo_get_source(context_), CAIRO_FILTER_NEAREST);
    cairo_paint(context_);
    cairo_restore(context_);
  }

  std::string bytes() const override {
    check(cairo_status(context_));
    if (format_ == CairoFormat::kPng) {
      std::string png;
      check(cairo_surface_write_to_png_stream(surface_.handle, append, &png));
      return png;
    }
    cairo_surface_finish(surface_.handle);
    check(cairo_surface_status(surface_.handle));
    return pdf_;
  }

 private:
  void use(Color color) {
    cairo_set_source_rgb(context_, color.red / 255.0, color.green / 255.0, color.blue / 255.0);
  }

  CairoFormat format_;
  std::string pdf_;
  Surface surface_;
  cairo_t* context_;
};

}  // namespace

std::unique_ptr<Canvas> make_cairo_canvas(CairoFormat format, double width, double height) {
  return std::make_unique<CairoCanvas>(format, width, height);
}

std::string png_of(const Image& image) {
  const Surface pixels(new_image(image.width, image.height));
  fill_pixels(pixels, image);
  std::string png;
  check(cairo_surface_write_to_png_stream(pixels.handle, append, &png));
  return png;
}

}  // namespace ladon::cli
