#include "plot/svg_canvas.h"

#include <algorithm>
#include <array>
#include <cstdio>

#include "plot/png.h"

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

std::string base64(std::string_view bytes) {
  constexpr std::string_view kLetters =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string result;
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    unsigned word = 0;
    for (std::size_t j = 0; j < 3; ++j) {
      const unsigned byte = i + j < bytes.size() ? static_cast<unsigned char>(bytes[i + j]) : 0;
      word = word << 8 | byte;
    }
    for (std::size_t j = 0; j < 4; ++j) {
      const bool padding = i + j > bytes.size();
      result += padding ? '=' : kLetters[word >> (18 - 6 * j) & 63];
    }
  }
  return result;
}

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

void SvgCanvas::image(const Box& box, const Image& image) {
  const int factor = std::clamp(static_cast<int>(2 * box.width / image.width), 1, 16);
  text_ += "<image" + box_attributes(box) +
           " preserveAspectRatio=\"none\" style=\"image-rendering:pixelated\" "
           "href=\"data:image/png;base64," +
           base64(encode_png(enlarged(image, factor))) + "\"/>\n";
}

std::string SvgCanvas::bytes() const { return text_ + "</svg>\n"; }

}  // namespace ladon::cli
