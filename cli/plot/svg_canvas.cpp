#include "plot/svg_canvas.h"

#include <algorithm>
#include <array>
#include <cstdio>

#include "plot/base64.h"
#ifdef LADON_CAIRO
#include "plot/cairo_canvas.h"
#endif

namespace ladon::cli {
namespace {

std::string number(double value) {
  std::array<char, 32> text{};
  const int size = std::snprintf(text.data(), text.size(), "%.2f", value);
  return {text.data(), static_cast<std::size_t>(size)};
}

std::string attribute(const char* name, double value) {
  return std::string(" ") + name + "=\"" + number(value) + "\"";
}

std::string color_attribute(const char* name, Color color) {
  std::array<char, 8> text{};
  std::snprintf(text.data(), text.size(), "#%02x%02x%02x", color.red, color.green, color.blue);
  return std::string(" ") + name + "=\"" + text.data() + "\"";
}

std::string box_attributes(const Box& box) {
  return attribute("x", box.x) + attribute("y", box.y) + attribute("width", box.width) +
         attribute("height", box.height);
}

std::string escaped(std::string_view words) {
  std::string result;
  for (const char letter : words) {
    switch (letter) {
      case '<': result += "&lt;"; break;
      case '>': result += "&gt;"; break;
      case '&': result += "&amp;"; break;
      default: result += letter;
    }
  }
  return result;
}

#ifdef LADON_CAIRO
/// Each pixel as factor x factor: viewers that smooth pictures then smooth the edges alone.
Image enlarged(const Image& image, int factor) {
  Image result{image.width * factor, image.height * factor, {}};
  result.pixels.reserve(image.pixels.size() * static_cast<std::size_t>(factor * factor));
  for (int y = 0; y < result.height; ++y) {
    for (int x = 0; x < result.width; ++x) {
      const auto row = static_cast<std::size_t>(y / factor);
      const auto column = static_cast<std::size_t>(x / factor);
      result.pixels.push_back(image.pixels[row * static_cast<std::size_t>(image.width) + column]);
    }
  }
  return result;
}
#endif

}  // namespace

SvgCanvas::SvgCanvas(double width, double height) {
  text_ = "<svg xmlns=\"http://www.w3.org/2000/svg\"" + attribute("width", width) +
          attribute("height", height) + " viewBox=\"0 0 " + number(width) + " " + number(height) +
          "\" font-family=\"Helvetica, Arial, sans-serif\">\n";
  rectangle({0, 0, width, height}, kWhite);
}

void SvgCanvas::rectangle(const Box& box, Color fill) {
  text_ += "<rect" + box_attributes(box) + color_attribute("fill", fill) + "/>\n";
}

void SvgCanvas::line(Point from, Point to, Color color, double thickness) {
  text_ += "<line" + attribute("x1", from.x) + attribute("y1", from.y) + attribute("x2", to.x) +
           attribute("y2", to.y) + color_attribute("stroke", color) +
           attribute("stroke-width", thickness) + " stroke-linecap=\"square\"/>\n";
}

void SvgCanvas::text(Point at, std::string_view words, const TextStyle& style) {
  constexpr std::array<const char*, 3> kAnchors{"start", "middle", "end"};
  text_ += "<text" + attribute("x", at.x) + attribute("y", at.y) +
           attribute("font-size", style.size) + " text-anchor=\"" +
           kAnchors[static_cast<std::size_t>(style.anchor)] + "\"" +
           color_attribute("fill", style.color);
  if (style.bold) text_ += " font-weight=\"bold\"";
  if (style.upwards) {
    text_ += " transform=\"rotate(-90 " + number(at.x) + " " + number(at.y) + ")\"";
  }
  text_ += ">" + escaped(words) + "</text>\n";
}

#ifdef LADON_CAIRO
void SvgCanvas::image(const Box& box, const Image& image) {
  const int factor = std::clamp(static_cast<int>(2 * box.width / image.width), 1, 16);
  text_ += "<image" + box_attributes(box) +
           " preserveAspectRatio=\"none\" style=\"image-rendering:pixelated\" "
           "href=\"data:image/png;base64," +
           base64(png_of(enlarged(image, factor))) + "\"/>\n";
}
#else
// Nothing here can compress a picture: a rectangle for each run of equal pixels.
void SvgCanvas::image(const Box& box, const Image& image) {
  const double width = box.width / image.width;
  const double height = box.height / image.height;
  text_ += "<g shape-rendering=\"crispEdges\">\n";
  for (int y = 0; y < image.height; ++y) {
    const auto row = image.pixels.begin() + static_cast<std::ptrdiff_t>(y) * image.width;
    for (int x = 0; x < image.width;) {
      const Color color = row[x];
      const int first = x;
      while (x < image.width && row[x] == color) ++x;
      rectangle({box.x + first * width, box.y + y * height, (x - first) * width, height}, color);
    }
  }
  text_ += "</g>\n";
}
#endif

std::string SvgCanvas::bytes() const { return text_ + "</svg>\n"; }

}  // namespace ladon::cli
