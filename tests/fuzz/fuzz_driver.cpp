// Runs a fuzz target without libFuzzer: over the files of its corpus as they are, and over damaged
// ones made from them by a seeded generator. So every compiler and every run of the tests has it.
//
//   fuzz_NAME FOLDER [cases] [seed]

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "io/mutations.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

void run(const std::string& bytes) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
}

}  // namespace

int main(int count, char** values) {
  if (count < 2) {
    std::cerr << "usage: " << values[0] << " FOLDER [cases] [seed]\n";
    return 2;
  }
  const std::int64_t cases = count > 2 ? std::atoll(values[2]) : 2000;
  const auto seed = static_cast<std::uint64_t>(count > 3 ? std::atoll(values[3]) : 1);
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(values[1])) {
    paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  std::vector<std::string> corpus;
  for (const std::filesystem::path& path : paths) {
    std::ifstream file(path, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  if (corpus.empty()) {
    std::cerr << values[0] << ": " << values[1] << ": no files\n";
    return 2;
  }
  const std::vector<std::string> words = {
      "0",  "-1",   "1e999", "18446744073709551615", "null", "true", "{}", "[]", "\"", "\n",
      "--", "auto", "nan",   "9223372036854775807"};
  for (const std::string& bytes : corpus) run(bytes);
  for (std::int64_t i = 0; i < cases; ++i) {
    ladon::Random random(seed, static_cast<std::uint64_t>(i));
    const auto which =
        static_cast<std::size_t>(random.below(static_cast<std::int64_t>(corpus.size())));
    run(ladon::test::mutated(corpus[which], words, random));
  }
  std::cout << corpus.size() << " files and " << cases << " damaged ones\n";
  return 0;
}
