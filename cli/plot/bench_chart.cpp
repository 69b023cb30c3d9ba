#include "plot/bench_chart.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <string_view>
#include <vector>

namespace ladon::cli {
namespace {

using bench::Limit;
using bench::PeerTiming;
using bench::Row;

constexpr double kMargin = 24;
constexpr double kTop = 118;       // of the first bar
constexpr double kRowHeight = 18;  // from one bar to the next
constexpr double kBarHeight = 11;
constexpr double kNamesLeft = kMargin + 62;  // behind the kernels' names
constexpr double kBarsLeft = kNamesLeft + 330;
constexpr double kBarsWidth = 400;
constexpr double kNumberRoom = 44;  // for a share behind its bar
constexpr double kPeerWidth = 130;
constexpr double kBottom = 76;  // for the axis and the legend
constexpr double kLetters = 10.5;

constexpr Color kTargetColor{0xc0, 0x2b, 0x2b};

struct PeerColumn {
  std::string_view peer;
  std::string_view title;
};
constexpr std::array<PeerColumn, 4> kPeers{{{"pytorch", "PyTorch"},
                                            {"pytorch-cudnn", "PyTorch, cuDNN"},
                                            {"pytorch-flash", "PyTorch, Flash"},
                                            {"onnxruntime", "ONNX Runtime"}}};

Color color_of(Limit limit) {
  switch (limit) {
    case Limit::kFma: return {0x3d, 0x7c, 0xc9};
    case Limit::kBf16: return {0x9a, 0x6f, 0xc4};
    case Limit::kAmx: return {0x5b, 0x2a, 0x86};
    case Limit::kProduct: return {0xc9, 0x7a, 0x3d};
    case Limit::kMemory: return {0x3f, 0xa7, 0x96};
    case Limit::kRead: return {0x2b, 0x7f, 0x72};
  }
  return kGrey;
}

/// With this many digits after the point.
std::string fixed(double value, int digits) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.*f", digits, value);
  return text.data();
}

const PeerTiming* measured(const Row& row, std::string_view peer) {
  for (const PeerTiming& one : row.peers) {
    if (one.peer == peer && one.measured()) return &one;
  }
  return nullptr;
}

/// What is drawn, and where.
class BenchChart {
 public:
  BenchChart(const std::filesystem::path& path, std::span<const Row> rows) : rows_(rows) {
    for (const PeerColumn& column : kPeers) {
      const bool any = std::any_of(rows.begin(), rows.end(), [&](const Row& row) {
        return measured(row, column.peer) != nullptr;
      });
      if (any) columns_.push_back(column);
    }
    for (const Row& row : rows) most_ = std::max({most_, row.share(), row.target.value_or(0)});
    if (!std::isfinite(most_)) most_ = 1;
    bottom_ = kTop + kRowHeight * static_cast<double>(rows.size());
    const double width = peers_left() + kPeerWidth * static_cast<double>(columns_.size());
    // The legend needs some width.
    canvas_ = make_canvas(path, std::max(width, 900.0) + kMargin, bottom_ + kBottom);
  }

  std::unique_ptr<Canvas> draw(const std::string& machine) {
    canvas_->text({kMargin, 32}, "Ladon's benchmark: share of this machine's own limits",
                  {.size = 16, .bold = true});
    canvas_->text({kMargin, 52}, machine, {.size = 11, .color = kGrey});
    draw_axis();
    draw_columns();
    for (std::size_t i = 0; i < rows_.size(); ++i) draw_row(i);
    draw_legend();
    return std::move(canvas_);
  }

 private:
  static double peers_left() { return kBarsLeft + kBarsWidth + kNumberRoom + 16; }
  double x_of(double share) const { return kBarsLeft + kBarsWidth * share / most_; }

  void draw_axis() {
    for (int percent = 0; percent <= static_cast<int>(std::lround(100 * most_)); percent += 20) {
      const double x = x_of(percent / 100.0);
      canvas_->line({x, kTop - 6}, {x, bottom_}, percent == 0 ? kGrey : kPaleGrey);
      canvas_->text({x, kTop - 12}, std::to_string(percent) + " %",
                    {.size = 10, .anchor = Anchor::kMiddle, .color = kGrey});
    }
    canvas_->text({kBarsLeft, kTop - 30}, "share of the ceiling (%)", {.size = 12, .bold = true});
  }

  void draw_columns() {
    canvas_->text({kMargin, kTop - 12}, "kernels", {.size = 11, .bold = true});
    canvas_->text({kNamesLeft, kTop - 12}, "case", {.size = 11, .bold = true});
    if (columns_.empty()) return;
    canvas_->text({peers_left(), kTop - 30}, "speed over peers, times (target)",
                  {.size = 12, .bold = true});
    double x = peers_left();
    for (const PeerColumn& column : columns_) {
      canvas_->text({x, kTop - 12}, column.title, {.size = 11, .color = kGrey});
      x += kPeerWidth;
    }
  }

  void draw_row(std::size_t index) {
    const Row& row = rows_[index];
    const double top = kTop + kRowHeight * static_cast<double>(index);
    const double base = top + kBarHeight - 1;
    if (index > 0 && row.isa != rows_[index - 1].isa) {
      const double y = top - (kRowHeight - kBarHeight) / 2;
      canvas_->line({kMargin, y}, {kBarsLeft - 8, y}, kPaleGrey);
    }
    canvas_->text({kMargin, base}, row.isa, {.size = kLetters, .color = kGrey});
    canvas_->text({kNamesLeft, base}, row.name, {.size = kLetters});
    const double share = std::isfinite(row.share()) ? row.share() : 0;
    canvas_->rectangle({kBarsLeft, top, x_of(share) - kBarsLeft, kBarHeight}, color_of(row.limit));
    double label = x_of(share);
    if (row.target) {
      const double x = x_of(*row.target);
      canvas_->line({x, top - 2}, {x, top + kBarHeight + 2}, kTargetColor, 2);
      // The number stands behind the bar, or behind the target's mark where that is in its way.
      if (x > label - 4 && x < label + kNumberRoom) label = x;
    }
    canvas_->text({label + 6, base}, fixed(100 * share, 0) + (row.disturbed ? " %*" : " %"),
                  {.size = kLetters});
    double x = peers_left();
    for (const PeerColumn& column : columns_) {
      draw_ratio(row, column, {x, base});
      x += kPeerWidth;
    }
  }

  void draw_ratio(const Row& row, const PeerColumn& column, Point at) {
    const PeerTiming* const peer = measured(row, column.peer);
    if (peer == nullptr) return;
    std::string words = fixed(row.ratio(*peer), 2);
    if (row.pytorch_target && column.peer == "pytorch") {
      words += " (" + fixed(*row.pytorch_target, 1) + ")";
    }
    canvas_->text(at, words, {.size = kLetters});
  }

  void draw_legend() {
    const double y = bottom_ + 30;
    double x = kMargin;
    for (const Limit limit :
         {Limit::kFma, Limit::kBf16, Limit::kAmx, Limit::kProduct, Limit::kMemory, Limit::kRead}) {
      const bool any = std::any_of(rows_.begin(), rows_.end(),
                                   [&](const Row& row) { return row.limit == limit; });
      if (!any) continue;
      canvas_->rectangle({x, y - 10, 12, 12}, color_of(limit));
      canvas_->text({x + 18, y}, "ceiling: " + std::string(name_of(limit)), {.size = 12});
      x += 140;
    }
    canvas_->line({x + 4, y - 11}, {x + 4, y + 3}, kTargetColor, 2);
    canvas_->text({x + 14, y}, "target share", {.size = 12});
    x += 120;
    canvas_->text({x, y}, "*: other programs used the CPUs; the figure is unreliable",
                  {.size = 12});
    canvas_->text({kMargin, y + 22},
                  "Useful flops (causal counts half), or bytes read once; ceilings and peers "
                  "measured in the same rounds.",
                  {.size = 11, .color = kGrey});
  }

  std::span<const Row> rows_;
  std::vector<PeerColumn> columns_;  // of the peers that were measured
  double most_ = 1;                  // share at the axis's end
  double bottom_ = 0;                // of the bars
  std::unique_ptr<Canvas> canvas_;
};

}  // namespace

std::unique_ptr<Canvas> draw_bench_chart(const std::filesystem::path& path,
                                         std::span<const bench::Row> rows,
                                         const std::string& machine) {
  return BenchChart(path, rows).draw(machine);
}

}  // namespace ladon::cli
