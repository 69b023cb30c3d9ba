// Completions for shells, and the manual page: written from the command line's own description.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace ladon::cli {

struct OptionDescription {
  std::string name;  // "--plot"
  std::string type;  // "FILE.svg"; empty: a flag
  std::string help;
  std::vector<std::string> choices{};  // where there are a few
};

struct SubcommandDescription {
  std::string name;
  std::string help;
  std::vector<OptionDescription> options{};
};

/// `shell` is "bash", "zsh" or "fish". Throws UsageError.
std::string completion_script(std::string_view shell,
                              const std::vector<SubcommandDescription>& subcommands);

/// In the language of man.
std::string manual_page(std::string_view description, std::string_view footer,
                        const std::vector<SubcommandDescription>& subcommands);

}  // namespace ladon::cli
