// TextTable: columns that line up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace ladon::cli {

enum class Align : std::uint8_t { kLeft, kRight };

struct Column {
  std::string name;
  Align align = Align::kRight;
  bool brief = true;  // false: left out where the terminal is too narrow for all columns
};

/// How a line looks on a terminal with colours.
enum class LineStyle : std::uint8_t { kPlain, kBold, kRed };

/// The words of a text in lines that end before `width`. `used` columns of the first are taken; the
/// others begin with `margin` blanks.
std::string wrap_words(const std::string& text, std::size_t used, std::size_t margin,
                       std::size_t width);

class TextTable {
 public:
  explicit TextTable(std::vector<Column> columns) : columns_(std::move(columns)) {}

  /// One cell for each column.
  void add(std::vector<std::string> cells, LineStyle style = LineStyle::kPlain) {
    rows_.push_back({std::move(cells), style});
  }
  /// Lines, the names first; no blanks at their ends. In brief form where the terminal is narrow.
  std::string text() const;

 private:
  struct Row {
    std::vector<std::string> cells;
    LineStyle style;
  };

  std::vector<Column> columns_;
  std::vector<Row> rows_;
};

}  // namespace ladon::cli
