#include "text_table.h"

#include <algorithm>
#include <cstddef>
#include <sstream>

#include "terminal.h"

namespace ladon::cli {
namespace {

constexpr std::size_t kGap = 2;

std::string styled(std::string line, LineStyle style) {
  switch (style) {
    case LineStyle::kPlain: return line;
    case LineStyle::kBold: return "\033[1m" + line + "\033[0m";
    case LineStyle::kRed: return "\033[31m" + line + "\033[0m";
  }
  return line;
}

}  // namespace

std::string wrap_words(const std::string& text, std::size_t used, std::size_t margin,
                       std::size_t width) {
  std::string lines;
  std::istringstream words(text);
  for (std::string word; words >> word; used += word.size()) {
    if (used > margin && used + 1 + word.size() > width) {
      lines += "\n" + std::string(margin, ' ');
      used = margin;
    } else if (used > margin) {
      lines += ' ';
      ++used;
    }
    lines += word;
  }
  return lines;
}

std::string TextTable::text() const {
  std::vector<std::size_t> widths;
  std::vector<std::size_t> shown;
  std::size_t total = 0;
  for (std::size_t i = 0; i < columns_.size(); ++i) {
    std::size_t width = columns_[i].name.size();
    for (const Row& row : rows_) width = std::max(width, row.cells[i].size());
    widths.push_back(width);
    shown.push_back(i);
    total += width + (i == 0 ? 0 : kGap);
  }
  const auto most = terminal_width();
  // The last of those that may go first: what a row is stands to the left.
  for (std::size_t i = columns_.size(); most && i-- > 0;) {
    if (total <= static_cast<std::size_t>(*most)) break;
    if (columns_[i].brief) continue;
    std::erase(shown, i);
    total -= widths[i] + kGap;
  }
  const bool colours = shows_colours();
  std::string result;
  const auto add_line = [&](LineStyle style, const auto& cell_of) {
    std::string line;
    for (const std::size_t i : shown) {
      const std::string& cell = cell_of(i);
      const std::string blanks(widths[i] - cell.size(), ' ');
      if (i != shown.front()) line.append(kGap, ' ');
      line += columns_[i].align == Align::kLeft ? cell + blanks : blanks + cell;
    }
    line.erase(line.find_last_not_of(' ') + 1);
    result += (colours ? styled(std::move(line), style) : line) + '\n';
  };
  add_line(LineStyle::kPlain,
           [&](std::size_t i) -> const std::string& { return columns_[i].name; });
  for (const Row& row : rows_) {
    add_line(row.style, [&](std::size_t i) -> const std::string& { return row.cells[i]; });
  }
  return result;
}

}  // namespace ladon::cli
