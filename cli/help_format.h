// How `ladon help` is laid out: the defaults and conditions of an option follow its description,
// and lines fit 80 columns.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace ladon::cli {

/// The description with what applies to the option: "(required)", "(with --cached)", "[8192]".
std::string full_description(const CLI::Option& option);

/// What the description lists after its last colon: "Type of the cache: f32, f16 or bf16 [f32]".
/// Empty where that is not a list of words.
std::vector<std::string> choices(const CLI::Option& option);

class HelpFormatter : public CLI::Formatter {
 public:
  HelpFormatter() { column_width(24); }

  std::string make_option(const CLI::Option* option, bool is_positional) const override;
  std::string make_subcommand(const CLI::App* sub) const override;
};

}  // namespace ladon::cli
