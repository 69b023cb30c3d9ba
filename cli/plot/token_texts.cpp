#include "plot/token_texts.h"

#include <charconv>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>

#include "failure.h"
#include "standard_streams.h"

namespace ladon::cli {
namespace {

/// Newlines and the like as symbols, so that a token stays on its line.
std::string visible(const std::string& text) {
  std::string result;
  for (const char letter : text) {
    const auto byte = static_cast<unsigned char>(letter);
    if (letter == '\n') {
      result += "\u23ce";
    } else if (letter == '\t') {
      result += "\u21e5";
    } else {
      result += byte < 0x20 || byte == 0x7f ? '?' : letter;
    }
  }
  return result;
}

std::optional<std::int64_t> number_in(std::string_view text) {
  std::int64_t number = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number < 0) return {};
  return number;
}

}  // namespace

std::vector<std::string> read_token_texts(std::string_view option, const std::string& path) {
  std::ifstream file(input_path(option, path));
  const nlohmann::json document = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  std::vector<std::string> texts;
  bool good = document.is_array();
  for (std::size_t i = 0; good && i < document.size(); ++i) {
    good = document[i].is_string();
    if (good) texts.push_back(visible(document[i].get<std::string>()));
  }
  if (!good) {
    throw Failure(std::string(option) + ": " + path +
                  " is not what was expected: a JSON array of strings");
  }
  return texts;
}

std::vector<std::int64_t> parse_numbers(std::string_view text, std::int64_t count) {
  const auto refuse = [&] {
    throw UsageError("run: --heads: got '" + std::string(text) +
                     "', expected numbers and ranges from 0 to " + std::to_string(count - 1) +
                     ", such as 0,3,5-7");
  };
  std::vector<std::int64_t> numbers;
  for (std::string_view rest = text;;) {
    const std::size_t comma = std::min(rest.find(','), rest.size());
    const std::string_view part = rest.substr(0, comma);
    const std::size_t dash = part.find('-');
    const auto first = number_in(part.substr(0, dash));
    const auto last = dash == std::string_view::npos ? first : number_in(part.substr(dash + 1));
    if (!first || !last || *first > *last || *last >= count) refuse();
    for (std::int64_t number = *first; number <= *last; ++number) numbers.push_back(number);
    if (comma == rest.size()) return numbers;
    rest.remove_prefix(comma + 1);
  }
}

}  // namespace ladon::cli
