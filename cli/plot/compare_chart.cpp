#include "plot/compare_chart.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <vector>

#include "units.h"

namespace ladon::cli {
namespace {

constexpr double kWidth = 980;
constexpr double kHeight = 430;
constexpr double kMargin = 28;
constexpr double kTop = 128;
constexpr double kPanelHeight = 216;
constexpr double kAxis = 52;  // left of a panel, for its numbers
constexpr double kPanelWidth = (kWidth - 2 * kMargin) / 3 - kAxis - 12;

// Told apart in grey as well: each is darker than the one before.
constexpr std::array<Color, 4> kColors{
    {{0xf2, 0xb1, 0x34}, {0x3f, 0xa7, 0x96}, {0x3d, 0x7c, 0xc9}, {0x5b, 0x2a, 0x86}}};

struct Bar {
  double value = 0;
  double ceiling = 0;      // 0: none
  bool disturbed = false;  // means little, and is marked as in the table
};

struct Panel {
  std::string title;
  std::string unit;
  std::vector<Bar> bars;
};

/// A round number from which on to label an axis: 1, 2 or 5 times a power of ten, so that there are
/// four to eight steps up to `most`.
double tick_step(double most) {
  const double power = std::pow(10, std::floor(std::log10(most / 4)));
  const double leading = most / 4 / power;
  return power * (leading >= 5 ? 5 : leading >= 2 ? 2 : 1);
}

/// Whole numbers as such.
std::string number_text(double value) {
  return value == std::floor(value) ? format_count(std::llround(value)) : format_rate(value);
}

void draw_panel(Canvas& canvas, const Panel& panel, double left,
                std::span<const LayerMeasurement> rows) {
  double most = 0;
  for (const Bar& bar : panel.bars) most = std::max({most, bar.value, bar.ceiling});
  if (!(most > 0) || !std::isfinite(most)) most = 1;
  const double step = tick_step(most);
  // Space for the number above the highest bar.
  const double top_value = most * 1.1;
  const double bottom = kTop + kPanelHeight;
  const auto height_of = [&](double value) { return kPanelHeight * value / top_value; };

  canvas.text({left, kTop - 26}, panel.title, {.size = 13, .bold = true});
  canvas.text({left, kTop - 10}, panel.unit, {.size = 11, .color = kGrey});
  for (int i = 0; i * step <= top_value; ++i) {
    const double value = i * step;
    const double y = bottom - height_of(value);
    canvas.line({left, y}, {left + kPanelWidth, y}, value == 0 ? kGrey : kPaleGrey);
    canvas.text({left - 6, y + 4}, number_text(value),
                {.size = 10, .anchor = Anchor::kEnd, .color = kGrey});
  }
  const double slot = kPanelWidth / static_cast<double>(panel.bars.size());
  const double width = slot * 0.62;
  for (std::size_t i = 0; i < panel.bars.size(); ++i) {
    const Bar& bar = panel.bars[i];
    const double x = left + slot * static_cast<double>(i) + (slot - width) / 2;
    const double height = height_of(bar.value);
    canvas.rectangle({x, bottom - height, width, height}, kColors[i % kColors.size()]);
    double label = bottom - height;
    if (bar.ceiling > 0) {
      const double y = bottom - height_of(bar.ceiling);
      canvas.line({x - 4, y}, {x + width + 4, y}, kBlack, 2);
      // The number stands above the bar, or above both where there is no space between: never
      // inside a bar that is higher than its ceiling.
      if (label - y < 18) label = std::min(label, y);
    }
    canvas.text({x + width / 2, label - 5}, number_text(bar.value) + (bar.disturbed ? " *" : ""),
                {.size = 10.5, .anchor = Anchor::kMiddle});
    canvas.text({x + width / 2, bottom + 16}, rows[i].variant.kind,
                {.size = 12, .anchor = Anchor::kMiddle});
  }
}

void draw_legend(Canvas& canvas, std::span<const LayerMeasurement> rows) {
  double x = kMargin;
  const double y = kHeight - 34;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::string words = std::string(rows[i].variant.kind) + ": " + rows[i].details;
    canvas.rectangle({x, y - 10, 12, 12}, kColors[i % kColors.size()]);
    canvas.text({x + 18, y}, words, {.size = 12});
    x += 170;
  }
  canvas.line({x, y - 4}, {x + 20, y - 4}, kBlack, 2);
  canvas.text({x + 28, y}, "this machine's ceiling", {.size = 12});
  const bool disturbed = std::any_of(rows.begin(), rows.end(), [](const LayerMeasurement& row) {
    return row.prefill.disturbed || row.decode.disturbed;
  });
  if (disturbed) {
    canvas.text({kMargin, kHeight - 12},
                "* disturbed: other programs used the CPUs; the figure is unreliable",
                {.size = 11, .color = kGrey});
  }
}

}  // namespace

std::unique_ptr<Canvas> draw_compare_chart(const std::filesystem::path& path,
                                           std::span<const LayerMeasurement> rows,
                                           const CompareChartText& text) {
  Panel prefill{"Prefill", "tokens per second", {}};
  Panel decode{"Decoding", "tokens per second", {}};
  Panel cache{"KV cache", "bytes per token, one layer", {}};
  for (const LayerMeasurement& row : rows) {
    prefill.bars.push_back(
        {row.prefill.tokens_per_second, row.prefill.ceiling, row.prefill.disturbed});
    decode.bars.push_back({row.decode.tokens_per_second, row.decode.ceiling, row.decode.disturbed});
    cache.bars.push_back({.value = row.cache_bytes_per_token});
  }
  auto canvas = make_canvas(path, kWidth, kHeight);
  canvas->text({kMargin, 32}, text.title, {.size = 16, .bold = true});
  canvas->text({kMargin, 52}, text.work, {.size = 12});
  canvas->text({kMargin, 70}, text.machine, {.size = 11, .color = kGrey});
  double left = kMargin + kAxis;
  for (const Panel& panel : {prefill, decode, cache}) {
    draw_panel(*canvas, panel, left, rows);
    left += kPanelWidth + kAxis + 12;
  }
  draw_legend(*canvas, rows);
  return canvas;
}

}  // namespace ladon::cli
