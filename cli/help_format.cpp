#include "help_format.h"

#include <algorithm>
#include <set>
#include <sstream>

#include "text_table.h"

namespace ladon::cli {
namespace {

constexpr std::size_t kWidth = 80;

/// The name in the left column, the description broken into lines in the right one.
std::string two_columns(const std::string& name, const std::string& description,
                        std::size_t column) {
  std::string text = "  " + name;
  if (text.size() + 1 > column) text += "\n" + std::string(column, ' ');
  if (text.size() < column) text.resize(column, ' ');
  return text + wrap_words(description, column, column, kWidth) + "\n";
}

std::string names_of(const std::set<CLI::Option*>& options) {
  std::string text;
  for (const CLI::Option* option : options) {
    text += (text.empty() ? "" : ", ") + option->get_name();
  }
  return text;
}

}  // namespace

std::string full_description(const CLI::Option& option) {
  std::string text = option.get_description();
  if (option.get_required()) text += " (required)";
  if (!option.get_needs().empty()) text += " (with " + names_of(option.get_needs()) + ")";
  if (!option.get_excludes().empty()) text += " (not with " + names_of(option.get_excludes()) + ")";
  if (!option.get_default_str().empty()) text += " [" + option.get_default_str() + "]";
  return text;
}

std::vector<std::string> choices(const CLI::Option& option) {
  const std::string& text = option.get_description();
  const std::size_t colon = text.rfind(": ");
  if (colon == std::string::npos) return {};
  std::istringstream words(text.substr(colon + 1, text.find(" [", colon) - colon - 1));
  std::vector<std::string> found;
  bool ended = true;  // by a comma or "or": the next word is another choice
  for (std::string word; words >> word;) {
    if (word == "or" && !found.empty()) {
      ended = true;
      continue;
    }
    if (!ended) return {};
    ended = word.ends_with(',');
    if (ended) word.pop_back();
    if (!word.ends_with(":N")) found.push_back(word);  // cuda:N stands for many
  }
  return found.size() > 1 ? found : std::vector<std::string>();
}

std::string HelpFormatter::make_option(const CLI::Option* option, bool is_positional) const {
  std::string name = make_option_name(option, is_positional);
  name.erase(std::min(name.find('{'), name.size()));  // what a flag that negates would set
  if (option->get_type_size() != 0) name += " " + option->get_type_name();
  return two_columns(name, full_description(*option), get_column_width());
}

std::string HelpFormatter::make_subcommand(const CLI::App* sub) const {
  constexpr std::size_t kNames = 12;
  return two_columns(sub->get_name(), sub->get_description(), kNames);
}

}  // namespace ladon::cli
