// How `ladon help` is laid out: the defaults and conditions of an option follow its description,
// and lines fit 80 columns.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace ladon::cli {

/// The description with what applies to the option: "(required)", "(with --cached)", "[8192]".
std::string full_description(const CLI::Option& option);

class HelpFormatter : public CLI::Formatter {
 public:
  HelpFormatter() { column_width(24); }

  std::string make_option(const CLI::Option* option, bool is_positional) const override;
  std::string make_subcommand(const CLI::App* sub) const override;
};

}  // namespace ladon::cli
