// Letters made of straight strokes, for pictures that cannot ask a system for its fonts.
#pragma once

#include <string_view>
#include <vector>

#include "plot/canvas.h"

namespace ladon::cli {

/// Capitals are 12 units high; a font of some size has capitals of 0.7 of it.
inline constexpr double kFontUnitsPerSize = 12 / 0.7;

struct Segment {
  Point from;
  Point to;
};

/// The strokes of a line of text that begins at (0, 0) on its baseline, in units. What has no glyph
/// is a box.
std::vector<Segment> stroke_segments(std::string_view words);
/// Its width, in units.
double stroke_width(std::string_view words);

}  // namespace ladon::cli
