// The commands in docs/cli.md and README.md: those that are quick are run, of the others every
// option must exist.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "cli/run_ladon.h"
#include "io/io_support.h"
#include "ladon/npy.h"
#include "ladon/random.h"
#include "models/model_folder.h"
#include "support/host_context.h"

namespace ladon::test {
namespace {

/// Lines that begin with "ladon " in the blocks of a file, without comments, as words.
std::vector<std::vector<std::string>> commands_in(const std::string& name) {
  std::ifstream file(std::string(LADON_SOURCE_DIR) + "/" + name);
  std::vector<std::vector<std::string>> commands;
  bool in_block = false;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("```")) in_block = !in_block;
    if (!in_block || !line.starts_with("ladon ")) continue;
    std::istringstream words(line.substr(6, line.find('#') - 6));
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
    std::filesystem::create_directory("model");
    write_model("model", family_case("llama3"), DType::kF32);
    Tensor x(DType::kF32, {9, 20});
    fill_normal(host_context(), x, 0, 1, 1);
    write_npy("x.npy", x);
    std::filesystem::create_directory("acts");
    for (const char* const name : {"acts/layer_0.npy", "acts/layer_1.npy"}) write_npy(name, x);
  }
  void TearDown() override { std::filesystem::current_path(before_); }

  static void check(const std::vector<std::string>& command) {
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
  EXPECT_GE(commands.size(), 12U);
  for (const auto& command : commands) check(command);
}

TEST_F(CliDocs, TheReadme) {
  const auto commands = commands_in("README.md");
  EXPECT_GE(commands.size(), 3U);
  for (const auto& command : commands) check(command);
}

}  // namespace
}  // namespace ladon::test
