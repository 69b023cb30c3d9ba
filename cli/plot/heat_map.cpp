#include "plot/heat_map.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>

namespace ladon::cli {
namespace {

constexpr std::int64_t kMostCells = 192;  // along one side of a panel
constexpr double kMargin = 24;
constexpr double kLeft = 64;    // for the queries' axis
constexpr double kTop = 64;     // for the titles
constexpr double kBottom = 48;  // for the keys' axis
constexpr double kRight = 92;   // for the scale
constexpr double kGap = 14;
constexpr double kLabel = 16;  // above each panel
constexpr double kLeastWidth = 300;

// Warm and pale, where weights are white to blue: no weight looks like it.
constexpr Color kMasked{236, 232, 224};

/// From white through blue to nearly black.
Color shade(double part) {
  constexpr std::array<std::array<double, 3>, 5> kStops{
      {{255, 255, 255}, {189, 212, 235}, {98, 160, 208}, {30, 92, 160}, {10, 30, 66}}};
  const double position = std::clamp(part, 0.0, 1.0) * (kStops.size() - 1);
  const auto below = std::min(static_cast<std::size_t>(position), kStops.size() - 2);
  const double rest = position - static_cast<double>(below);
  const auto mix = [&](std::size_t channel) {
    const double value =
        kStops[below][channel] + rest * (kStops[below + 1][channel] - kStops[below][channel]);
    return static_cast<std::uint8_t>(std::lround(value));
  };
  return {mix(0), mix(1), mix(2)};
}

double shade_position(double weight, double largest) {
  return largest > 0 ? std::sqrt(std::max(0.0, weight) / largest) : 0;
}

/// The weights of one head in cells of `step` tokens on both sides.
Image panel_of(const ConstTensorView& head, std::int64_t step, double largest,
               const HeatMapText& text) {
  const std::int64_t query_len = head.size(0);
  const std::int64_t kv_len = head.size(1);
  const std::int64_t rows = (query_len + step - 1) / step;
  const std::int64_t columns = (kv_len + step - 1) / step;
  std::vector<double> cells(static_cast<std::size_t>(rows * columns), -1.0);  // masked
  const auto* weights = head.data_as<float>();
  for (std::int64_t i = 0; i < query_len; ++i) {
    for (std::int64_t j = 0; j < kv_len; ++j) {
      if (text.is_masked(i, j)) continue;
      double& cell = cells[static_cast<std::size_t>(i / step * columns + j / step)];
      cell = std::max(cell, static_cast<double>(weights[i * kv_len + j]));
    }
  }
  Image image{static_cast<int>(columns), static_cast<int>(rows), {}};
  for (const double cell : cells) {
    image.pixels.push_back(cell < 0 ? kMasked : shade(shade_position(cell, largest)));
  }
  return image;
}

std::string short_number(double value) {
  std::array<char, 32> text{};
  const int size = std::snprintf(text.data(), text.size(), "%.2g", value);
  return {text.data(), static_cast<std::size_t>(size)};
}

void draw_scale(Canvas& canvas, const Box& box, double largest, bool masked) {
  constexpr int kSteps = 64;
  Image ramp{1, kSteps, {}};
  for (int i = 0; i < kSteps; ++i) {
    ramp.pixels.push_back(shade(1 - static_cast<double>(i) / (kSteps - 1)));
  }
  canvas.image(box, ramp);
  canvas.outline(box, kGrey);
  for (const double part : {0.0, 0.25, 0.5, 0.75, 1.0}) {
    const double y = box.y + (1 - part) * box.height;
    const double right = box.x + box.width;
    canvas.line({right, y}, {right + 4, y}, kGrey);
    canvas.text({right + 7, y + 4}, short_number(part * part * largest), {.size = 11});
  }
  canvas.text({box.x, box.y - 8}, "weight", {.size = 11});
  if (!masked) return;
  const Box swatch{box.x, box.y + box.height + 16, box.width, 12};
  canvas.rectangle(swatch, kMasked);
  canvas.outline(swatch, kGrey);
  canvas.text({swatch.x + swatch.width + 7, swatch.y + 10}, "masked", {.size = 11});
}

/// A grid somewhat wider than high; without an empty place where the heads allow it.
std::int64_t columns_for(std::int64_t heads) {
  const double wanted = std::sqrt(1.5 * static_cast<double>(heads));
  const auto distance = [&](std::int64_t columns) {
    return std::abs(std::log(static_cast<double>(columns) / wanted));
  };
  std::int64_t best = std::min(heads, static_cast<std::int64_t>(std::ceil(wanted)));
  bool full = heads % best == 0;
  for (std::int64_t columns = 1; columns <= heads; ++columns) {
    if (heads % columns != 0 || distance(columns) > std::log(1.7)) continue;
    if (!full || distance(columns) < distance(best)) best = columns;
    full = true;
  }
  return best;
}

/// The texts of all tokens, or where the first and the last token of an axis are.
void draw_ticks(Canvas& canvas, const Box& panel, const ConstTensorView& weights,
                const HeatMapText& text, bool left, bool bottom) {
  const TextStyle style{.size = 10, .color = kGrey};
  TextStyle end = style;
  end.anchor = Anchor::kEnd;
  if (!text.tokens.empty()) {
    const double cell = panel.width / static_cast<double>(text.tokens.size());
    TextStyle upwards = end;
    upwards.upwards = true;
    for (std::size_t i = 0; i < text.tokens.size(); ++i) {
      const double middle = (static_cast<double>(i) + 0.5) * cell + 3.5;
      if (left) canvas.text({panel.x - 5, panel.y + middle}, text.tokens[i], end);
      if (bottom) {
        canvas.text({panel.x + middle, panel.y + panel.height + 5}, text.tokens[i], upwards);
      }
    }
    return;
  }
  if (left) {
    canvas.text({panel.x - 5, panel.y + 9}, "0", end);
    canvas.text({panel.x - 5, panel.y + panel.height}, std::to_string(weights.size(1) - 1), end);
  }
  if (bottom) {
    canvas.text({panel.x, panel.y + panel.height + 13}, "0", style);
    canvas.text({panel.x + panel.width, panel.y + panel.height + 13},
                std::to_string(weights.size(2) - 1), end);
  }
}

/// About as wide as the longest text.
double text_space(const std::vector<std::string>& tokens) {
  std::size_t longest = 0;
  for (const std::string& token : tokens) longest = std::max(longest, token.size());
  return 6 * static_cast<double>(longest);
}

}  // namespace

std::unique_ptr<Canvas> draw_heat_map(const std::filesystem::path& path,
                                      const ConstTensorView& weights, const HeatMapText& text) {
  const std::int64_t heads = weights.size(0);
  const std::int64_t longest = std::max(weights.size(1), weights.size(2));
  const std::int64_t step = std::max<std::int64_t>(1, (longest + kMostCells - 1) / kMostCells);
  const std::int64_t columns = columns_for(heads);
  const std::int64_t rows = (heads + columns - 1) / columns;
  const double least_side = heads == 1 ? 420 : heads <= 12 ? 190 : 130;
  // A line of text for each token that has one.
  const double side = std::max(least_side, 11 * static_cast<double>(text.tokens.size()));
  const double space = text_space(text.tokens);
  const double axis = kLeft + space;

  float most = 0;
  const auto* elements = weights.data_as<float>();
  for (std::int64_t i = 0; i < weights.num_elements(); ++i) most = std::max(most, elements[i]);
  const double largest = static_cast<double>(most);

  const double grid_width = static_cast<double>(columns) * (side + kGap) - kGap;
  const double grid_height = static_cast<double>(rows) * (side + kGap + kLabel) - kGap;
  const double width = std::max(axis + grid_width + kRight + kMargin, axis + kLeastWidth + kMargin);
  auto canvas = make_canvas(path, width, kTop + grid_height + kBottom + space + kMargin);
  canvas->text({axis, 28}, text.title, {.size = 16, .bold = true});
  std::string subtitle = text.subtitle;
  if (step > 1) {
    subtitle += "; a cell is the largest of " + std::to_string(step) + " x " + std::to_string(step);
  }
  canvas->text({axis, 47}, subtitle, {.size = 11, .color = kGrey});

  for (std::int64_t head = 0; head < heads; ++head) {
    const std::int64_t row = head / columns;
    const std::int64_t column = head % columns;
    const Box panel{axis + static_cast<double>(column) * (side + kGap),
                    kTop + kLabel + static_cast<double>(row) * (side + kGap + kLabel), side, side};
    canvas->text({panel.x, panel.y - 4},
                 "head " + std::to_string(text.heads[static_cast<std::size_t>(head)]),
                 {.size = 11});
    canvas->image(panel, panel_of(weights.select(0, head), step, largest, text));
    canvas->outline(panel, kPaleGrey);
    draw_ticks(*canvas, panel, weights, text, column == 0,
               row + 1 == rows || head + columns >= heads);
  }
  canvas->text({26, kTop + kLabel + grid_height / 2}, "query token",
               {.size = 12, .anchor = Anchor::kMiddle, .upwards = true});
  canvas->text({axis + grid_width / 2, kTop + grid_height + 40 + space}, "key token",
               {.size = 12, .anchor = Anchor::kMiddle});
  draw_scale(*canvas, {axis + grid_width + 24, kTop + kLabel, 16, std::min(side, 190.0)}, largest,
             text.causal || text.window > 0);
  return canvas;
}

}  // namespace ladon::cli
