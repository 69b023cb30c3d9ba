// The real `ladon` command, run as a user would, and what it prints held to its schema.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace ladon::test {

/// Whether the command was built with Cairo, and so draws PNG and PDF.
inline constexpr bool kWithCairo = LADON_COMMAND_HAS_CAIRO;
/// What its complaints about a picture's name end in.
inline constexpr const char* kPictureNames =
    kWithCairo ? "ends in .svg, .png or .pdf"
               : "ends in .svg (this build has no Cairo, which draws .png and .pdf)";

struct Outcome {
  int status = -1;  // -1: ended by a signal
  int signal = 0;
  std::string out;
  std::string err;
};

struct LadonRun {
  std::vector<std::string> arguments;
  std::vector<std::string> environment{};           // "NAME=value", besides what is there
  std::optional<std::uint64_t> file_size_limit{};   // as a disk that is nearly full
  std::optional<std::filesystem::path> out_path{};  // stdout goes there
  std::optional<std::filesystem::path> in_path{};   // stdin comes from there
  /// Milliseconds after which it gets this signal.
  int signal_after = 0;
  int signal = 0;
};

Outcome run_ladon(const LadonRun& run);
inline Outcome run_ladon(const std::vector<std::string>& arguments) {
  return run_ladon(LadonRun{.arguments = arguments});
}

/// Expects a failure with that status, nothing on stdout, and one line on stderr, which it returns
/// without "ladon: ".
std::string complaint_of(const LadonRun& run, int status);
inline std::string complaint_of(const std::vector<std::string>& arguments, int status) {
  return complaint_of(LadonRun{.arguments = arguments}, status);
}

/// Runs with --json, expects that status, nothing on stderr, and a document that fits
/// docs/cli_schema.json: the definition of the command's name, or another one. Returns it.
nlohmann::json document_of(std::vector<std::string> arguments, int status = 0,
                           const std::string& definition = {});

/// The first thing that is wrong with a document, or nothing. Knows what our schema uses of JSON
/// Schema: $ref, type, const, enum, minimum, required, properties, additionalProperties, items,
/// minItems; a keyword that it does not know is a fault too.
std::string schema_fault(const nlohmann::json& root, const nlohmann::json& schema,
                         const nlohmann::json& value, const std::string& where = "document");

}  // namespace ladon::test
