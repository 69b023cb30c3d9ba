// TextTable: columns that line up.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ladon::cli {

enum class Align : std::uint8_t { kLeft, kRight };

struct Column {
  std::string name;
  Align align = Align::kRight;
};

class TextTable {
 public:
  explicit TextTable(std::vector<Column> columns) : columns_(std::move(columns)) {}

  /// One cell for each column.
  void add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  /// Lines, the names first; no blanks at their ends.
  std::string text() const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace ladon::cli
