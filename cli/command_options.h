// Options that several subcommands have, on CLI11.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "commands.h"
#include "failure.h"

namespace ladon::cli {

// More tokens or sequences than any memory holds; products of a few of them still fit 64 bits.
inline constexpr std::int64_t kMostTokens = std::int64_t{1} << 40;

/// Errors of Ladon's parsers, under the option's name.
template <class Parse>
auto parsed(const std::string& option, const Parse& parse) {
  try {
    return parse();
  } catch (const UsageError& error) {
    throw UsageError(option + ": " + error.what());
  }
}

/// "a, b, c".
std::string joined(const std::vector<std::string>& names);

CLI::Option* add_count(CLI::App* app, const std::string& name, std::int64_t& value,
                       std::int64_t least, std::int64_t most, const std::string& help);
/// `assign` takes the dtype; the help names the choices.
CLI::Option* add_dtype(CLI::App* app, const std::string& name, const std::vector<DType>& choices,
                       const std::string& help, const std::function<void(DType)>& assign);
void add_machinery(CLI::App* app, Machinery& machinery,
                   const std::string& default_kernels = "the fastest");
/// After add_machinery(): the kernels of --isa are the CPU's.
void add_device(CLI::App* app, Machinery& machinery);
void add_json(CLI::App* app, bool& json);
void add_plot(CLI::App* app, std::string& path);
void add_ignored(CLI::App* app, std::vector<std::string>& fields);

}  // namespace ladon::cli
