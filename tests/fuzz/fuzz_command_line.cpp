// libFuzzer over the command's arguments, one a line: whatever they are, they are understood or
// refused with UsageError. Nothing is run. Build with -DLADON_FUZZ=ON and clang, or see
// fuzz_driver.cpp.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "command_line.h"
#include "commands.h"
#include "failure.h"

// The commands themselves, which are not what is searched.
namespace ladon::cli {

int run_info(const InfoOptions&) { return 0; }
int run_plan(const PlanOptions&) { return 0; }
int run_check(const CheckOptions&) { return 0; }
int run_layer(const RunOptions&) { return 0; }
int run_convert(const ConvertOptions&) { return 0; }
int run_compare(const CompareOptions&) { return 0; }
int run_bench(const BenchOptions&) { return 0; }

}  // namespace ladon::cli

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::istringstream lines(std::string(reinterpret_cast<const char*>(data), size));
  std::vector<std::string> words{"ladon"};
  for (std::string line; std::getline(lines, line);) words.push_back(line.c_str());
  std::vector<const char*> arguments;
  for (const std::string& word : words) arguments.push_back(word.c_str());
  arguments.push_back(nullptr);
  try {
    const auto work =
        ladon::cli::parse_command_line(static_cast<int>(words.size()), arguments.data());
    if (work == nullptr) std::abort();
  } catch (const ladon::cli::UsageError&) {
  }
  return 0;
}
