// Charts and pictures as a command without Cairo draws them: compiled here without it.
#include <gtest/gtest.h>

#include <regex>
#include <string>
#include <vector>

#include "failure.h"
#include "ladon/tensor.h"
#include "plot/compare_chart.h"
#include "plot/heat_map.h"

namespace ladon::cli {
namespace {

LayerMeasurement row(const char* kind, double rate, double ceiling, bool disturbed) {
  LayerMeasurement measured;
  measured.variant.kind = kind;
  measured.prefill = {
      .tokens_per_second = rate, .ceiling = ceiling, .bound = "FMA", .disturbed = disturbed};
  measured.decode = {.tokens_per_second = 7, .ceiling = 9, .bound = "memory"};
  measured.cache_bytes_per_token = 64;
  return measured;
}

/// The y of the text, and the top of the bar under it.
struct Label {
  double y = 0;
  double bar = 0;
};

Label label_of(const std::string& svg, const std::string& words) {
  Label label;
  const std::size_t text = svg.find(">" + words + "<");
  if (text == std::string::npos) return label;
  const std::size_t begin = svg.rfind("<text", text);
  std::smatch match;
  const std::string tag = svg.substr(begin, text - begin);
  if (std::regex_search(tag, match, std::regex(" y=\"([0-9.]+)\""))) label.y = std::stod(match[1]);
  const std::string bar = svg.substr(svg.rfind("<rect", begin), 200);
  if (std::regex_search(bar, match, std::regex(" y=\"([0-9.]+)\"")))
    label.bar = std::stod(match[1]);
  return label;
}

TEST(CompareChart, DisturbedRowsAreMarkedAndNumbersStandOutside) {
  // Below its ceiling, at it, and above it.
  const std::vector<LayerMeasurement> rows{row("MHA", 103, 200, false), row("GQA", 196, 200, true),
                                           row("MQA", 210, 150, false)};
  const std::string svg = draw_compare_chart("c.svg", rows, {"t", "m", "w"})->bytes();
  EXPECT_NE(svg.find(">196 *<"), std::string::npos);
  EXPECT_EQ(svg.find(">103 *<"), std::string::npos);
  EXPECT_NE(svg.find("* disturbed: other programs used the CPUs"), std::string::npos);
  for (const std::string words : {"103", "196 *", "210"}) {
    const Label label = label_of(svg, words);
    EXPECT_GT(label.y, 0) << words;
    EXPECT_LT(label.y, label.bar) << words << " stands inside its bar";
  }
  const std::vector<LayerMeasurement> calm{row("MHA", 100, 200, false)};
  EXPECT_EQ(draw_compare_chart("c.svg", calm, {"t", "m", "w"})->bytes().find("disturbed"),
            std::string::npos);
}

TEST(HeatMap, MaskedCellsLookUnlikeZeros) {
  Tensor weights(DType::kF32, {1, 3, 3});
  auto* numbers = weights.data_as<float>();
  numbers[0] = 1;  // token 0 sees itself; token 1 sees token 1 alone, and token 0 with weight 0
  numbers[4] = 1;
  numbers[8] = 1;
  HeatMapText text{.title = "t", .subtitle = "s", .causal = true, .window = 2};
  text.heads = {7};
  const std::string svg = draw_heat_map("w.svg", weights, text)->bytes();
  EXPECT_NE(svg.find(">head 7<"), std::string::npos);
  // Masked: (0, 1), (0, 2), (1, 2) as two runs, (2, 0) by the window, and the legend's.
  std::size_t masked = 0;
  for (std::size_t at = 0; (at = svg.find("#ece8e0", at)) != std::string::npos; ++at) ++masked;
  EXPECT_EQ(masked, 4U);
  EXPECT_NE(svg.find(">masked<"), std::string::npos);
}

TEST(Pictures, WithoutCairoThereIsSvgAlone) {
  EXPECT_NO_THROW(check_picture_path("x", "w.svg"));
  for (const char* name : {"w.png", "w.pdf", "w"}) {
    try {
      check_picture_path("run: --weights", name);
      ADD_FAILURE() << name;
    } catch (const UsageError& error) {
      EXPECT_EQ(std::string(error.what()),
                std::string("run: --weights: cannot draw '") + name +
                    "': expected a name that ends in .svg (this build has no Cairo, which draws "
                    ".png and .pdf)");
    }
  }
}

}  // namespace
}  // namespace ladon::cli
