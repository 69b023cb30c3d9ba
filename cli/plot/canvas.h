// A canvas: a few shapes and words, drawn by one program into any kind of picture.
//
// Units are those of an SVG: one is about a pixel of a plain screen, y grows downwards. A PNG has
// two pixels for each.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace ladon::cli {

struct Color {
  std::uint8_t red = 0;
  std::uint8_t green = 0;
  std::uint8_t blue = 0;
  bool operator==(const Color&) const = default;
};

inline constexpr Color kBlack{0x1b, 0x1f, 0x24};
inline constexpr Color kGrey{0x6e, 0x77, 0x81};
inline constexpr Color kPaleGrey{0xd8, 0xde, 0xe4};
inline constexpr Color kWhite{0xff, 0xff, 0xff};

struct Point {
  double x = 0;
  double y = 0;
};

struct Box {
  double x = 0;
  double y = 0;
  double width = 0;
  double height = 0;
};

enum class Anchor : std::uint8_t { kStart, kMiddle, kEnd };

struct TextStyle {
  double size = 12;  // of the letters' line, as fonts are measured
  Anchor anchor = Anchor::kStart;
  Color color = kBlack;
  bool bold = false;
  bool upwards = false;  // rotated by 90 degrees, for the names of vertical axes
};

/// Pixels, row by row.
struct Image {
  int width = 0;
  int height = 0;
  std::vector<Color> pixels{};
};

class Canvas {
 public:
  virtual ~Canvas() = default;
  virtual void rectangle(const Box& box, Color fill) = 0;
  virtual void line(Point from, Point to, Color color, double thickness = 1) = 0;
  /// `at` is on the baseline. UTF-8.
  virtual void text(Point at, std::string_view words, const TextStyle& style) = 0;
  /// Each pixel becomes a rectangle; nothing is smoothed.
  virtual void image(const Box& box, const Image& image) = 0;
  /// The file.
  virtual std::string bytes() const = 0;

  void outline(const Box& box, Color color, double thickness = 1);
};

/// Throws UsageError unless the path ends in .svg (with Cairo also .png or .pdf), or is standard
/// output, which gets an SVG; `option` begins the message.
void check_picture_path(std::string_view option, const std::filesystem::path& path,
                        bool pages = false);

/// A white canvas for a path that has passed the check above.
std::unique_ptr<Canvas> make_canvas(const std::filesystem::path& path, double width, double height);

}  // namespace ladon::cli
