// The commands in docs/cli.md and README.md, as a reader types them: those that are quick are run,
// of the others every option must exist.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "cli/run_ladon.h"
#include "io/io_support.h"

namespace ladon::test {
namespace {

/// Lines of the blocks of a file that run the command, the example or cp, without comments, as
/// words.
std::vector<std::vector<std::string>> commands_in(const std::string& name) {
  std::ifstream file(std::string(LADON_SOURCE_DIR) + "/" + name);
  std::vector<std::vector<std::string>> commands;
  bool in_block = false;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("```")) in_block = !in_block;
    const std::string program = line.substr(0, line.find(' '));
    if (!in_block || (program != "ladon" && program != "llama_decoder" && program != "cp"))
      continue;
    std::istringstream words(line.substr(0, line.find('#')));
    commands.emplace_back();
    for (std::string word; words >> word;) commands.back().push_back(word);
  }
  return commands;
}

class CliDocs : public testing::Test {
 protected:
  void SetUp() override {
    before_ = std::filesystem::current_path();
    std::filesystem::current_path(temp_.path());
  }
  void TearDown() override { std::filesystem::current_path(before_); }

  /// What makes the sample model: found by its full name in place of the PATH that a reader sets.
  static void prepare(const std::vector<std::string>& words) {
    std::string line = words.front() == "cp" ? "cp" : LADON_SAMPLE_PROGRAM;
    for (std::size_t i = 1; i < words.size(); ++i) line += " " + words[i];
    EXPECT_EQ(std::system(line.c_str()), 0) << line;
  }

  static void check(const std::vector<std::string>& words) {
    if (words.front() != "ladon") return prepare(words);
    const std::vector<std::string> command(words.begin() + 1, words.end());
    const std::string& name = command.front();
    const bool on_gpu = std::find(command.begin(), command.end(), "--device") != command.end();
    const auto needs_cairo = [](const std::string& word) { return word.ends_with(".png"); };
    const bool left_out = (name == "convert" && !LADON_WITH_CONVERT) ||
                          (!kWithCairo && std::any_of(command.begin(), command.end(), needs_cairo));
    if (name != "compare" && name != "bench" && !on_gpu && !left_out) {
      const Outcome outcome = run_ladon(command);
      EXPECT_EQ(outcome.status, 0) << outcome.err;
      return;
    }
    const std::string help = run_ladon({name, "--help"}).out;
    for (const std::string& word : command) {
      if (!word.starts_with("--")) continue;
      EXPECT_NE(help.find("  " + word + " "), std::string::npos) << name << " " << word;
    }
  }

  TempFolder temp_;
  std::filesystem::path before_;
};

TEST_F(CliDocs, TheGuide) {
  const auto commands = commands_in("docs/cli.md");
  EXPECT_GE(commands.size(), 20U);
  for (const auto& command : commands) check(command);
}

TEST_F(CliDocs, TheReadme) {
  const auto commands = commands_in("README.md");
  EXPECT_GE(commands.size(), 7U);
  for (const auto& command : commands) check(command);
}

}  // namespace
}  // namespace ladon::test
