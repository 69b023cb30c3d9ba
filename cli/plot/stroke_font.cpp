#include "plot/stroke_font.h"

#include <array>
#include <cstddef>

namespace ladon::cli {
namespace {

// A glyph is a few strokes with blanks between; a stroke is a list of points, two digits each: x
// from the left, and y from the top of the capitals. Digits go on with a = 10 to g = 16. Capitals
// reach from 0 to 12 (c), small letters from 4 on, and descenders to 16. A stroke of one point
// twice is a dot.
struct Glyph {
  char letter;
  double width;
  std::string_view strokes;
};

constexpr Glyph kGlyphs[] = {
    {' ', 3, ""},
    {'!', 2, "1018 1c1c"},
    {'"', 4, "1013 3033"},
    {'#', 8, "202c 606c 0484 0888"},
    {'%', 8, "0c80 102031332414030110 6878898b7c6c5b5968"},
    {'\'', 2, "1013"},
    {'(', 3, "3013193c"},
    {')', 3, "0023290c"},
    {'*', 6, "3238 0367 6307"},
    {'+', 6, "0868 353b"},
    {',', 2, "1c0e"},
    {'-', 4, "0848"},
    {'.', 2, "1c1c"},
    {'/', 5, "0d50"},
    {'0', 6, "2040626a4c2c0a0220"},
    {'1', 6, "12303c"},
    {'2', 6, "02204062640c6c"},
    {'3', 6, "01104062644626 46686a4c1c0b"},
    {'4', 6, "5c500868"},
    {'5', 6, "60000545676a4c1c0b"},
    {'6', 6, "5022060a2c4c6a68462608"},
    {'7', 6, "00602c"},
    {'8', 6, "260402204062644626 26080a2c4c6a6846"},
    {'9', 6, "1c4a666240200204264664"},
    {':', 2, "1616 1c1c"},
    {';', 2, "1616 1c0e"},
    {'<', 6, "64086c"},
    {'=', 6, "0666 0a6a"},
    {'>', 6, "04680c"},
    {'?', 6, "02204062643739 3c3c"},
    {'A', 8, "0c408c 2868"},
    {'B', 7, "000c 005072745606 56787a5c0c"},
    {'C', 8, "826020020a2c6c8a"},
    {'D', 8, "000c 0050828a5c0c"},
    {'E', 6, "60000c6c 0656"},
    {'F', 6, "60000c 0656"},
    {'G', 8, "826020020a2c6c8a8757"},
    {'H', 8, "000c 808c 0686"},
    {'I', 2, "101c"},
    {'J', 6, "606a4c2c0a"},
    {'K', 7, "000c 7007 257c"},
    {'L', 6, "000c6c"},
    {'M', 10, "0c0058a0ac"},
    {'N', 8, "0c008c80"},
    {'O', 8, "2060828a6c2c0a0220"},
    {'P', 7, "0c005072755707"},
    {'Q', 8, "2060828a6c2c0a0220 598c"},
    {'R', 7, "0c005072755707 477c"},
    {'S', 8, "82602002042666888a6c2c0a"},
    {'T', 8, "0080 404c"},
    {'U', 8, "000a2c6c8a80"},
    {'V', 8, "004c80"},
    {'W', 12, "003c629cc0"},
    {'X', 8, "008c 800c"},
    {'Y', 8, "004680 464c"},
    {'Z', 8, "00800c8c"},
    {'[', 3, "30101c3c"},
    {'\\', 5, "005d"},
    {']', 3, "00202c0c"},
    {'_', 6, "0d6d"},
    {'a', 6, "646c 664424060a2c4c6a"},
    {'b', 6, "000c 062444666a4c2c0a"},
    {'c', 6, "664424060a2c4c6a"},
    {'d', 6, "606c 664424060a2c4c6a"},
    {'e', 6, "0868664424060a2c4c6a"},
    {'f', 4, "4030212c 0444"},
    {'g', 6, "646e4g1g0f 664424060a2c4c6a"},
    {'h', 6, "000c 062444666c"},
    {'i', 2, "141c 1111"},
    {'j', 3, "242e1g0g 2121"},
    {'k', 6, "000c 6409 276c"},
    {'l', 2, "101c"},
    {'m', 10, "040c 062434565c 567484a6ac"},
    {'n', 6, "040c 062444666c"},
    {'o', 6, "2444666a4c2c0a0624"},
    {'p', 6, "040g 062444666a4c2c0a"},
    {'q', 6, "646g 664424060a2c4c6a"},
    {'r', 5, "040c 06244455"},
    {'s', 6, "65541405071858696b5c1c0b"},
    {'t', 4, "212b3c4c 0444"},
    {'u', 6, "040a2c4c6a 646c"},
    {'v', 6, "043c64"},
    {'w', 8, "042c456c84"},
    {'x', 6, "046c 640c"},
    {'y', 6, "043c 643c2f1g0g"},
    {'z', 6, "04640c6c"},
    {'|', 2, "101e"},
};

constexpr Glyph kUnknown{'\0', 6, "00606c0c00"};
constexpr double kGap = 2.6;  // between letters
constexpr double kBaseline = 12;

const Glyph& glyph_of(char letter) {
  for (const Glyph& glyph : kGlyphs) {
    if (glyph.letter == letter) return glyph;
  }
  return kUnknown;
}

double coordinate(char digit) { return digit >= 'a' ? digit - 'a' + 10 : digit - '0'; }

}  // namespace

std::vector<Segment> stroke_segments(std::string_view words) {
  std::vector<Segment> segments;
  double left = 0;
  for (const char letter : words) {
    const Glyph& glyph = glyph_of(letter);
    const auto point = [&](std::size_t i) {
      return Point{left + coordinate(glyph.strokes[i]),
                   coordinate(glyph.strokes[i + 1]) - kBaseline};
    };
    for (std::size_t i = 0; i + 3 < glyph.strokes.size();) {
      segments.push_back({point(i), point(i + 2)});
      const bool ends = i + 4 >= glyph.strokes.size() || glyph.strokes[i + 4] == ' ';
      i += ends ? 5 : 2;
    }
    left += glyph.width + kGap;
  }
  return segments;
}

double stroke_width(std::string_view words) {
  double width = 0;
  for (const char letter : words) width += glyph_of(letter).width + kGap;
  return words.empty() ? 0 : width - kGap;
}

}  // namespace ladon::cli
