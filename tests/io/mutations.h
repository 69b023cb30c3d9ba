// Damaged files, made from sound ones by a seeded generator.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "io/memory_file.h"
#include "ladon/error.h"
#include "ladon/random.h"

namespace ladon::test {

/// One to four changes: of a byte, of a number or word, of the length, or a piece moved or doubled.
inline std::string mutated(std::string bytes, const std::vector<std::string>& words,
                           Random& random) {
  const auto place = [&] {
    return static_cast<std::size_t>(random.below(static_cast<std::int64_t>(bytes.size()) + 1));
  };
  for (std::int64_t change = 0; change <= random.below(4); ++change) {
    const std::size_t at = place();
    const auto length = static_cast<std::size_t>(random.below(12));
    switch (random.below(6)) {
      case 0:
        if (at < bytes.size()) bytes[at] = static_cast<char>(random.below(256));
        break;
      case 1:
        if (at < bytes.size()) {
          bytes[at] = static_cast<char>(static_cast<unsigned char>(bytes[at]) ^
                                        (1U << static_cast<unsigned>(random.below(8))));
        }
        break;
      case 2: bytes.erase(at, length); break;
      case 3: bytes.insert(place(), bytes.substr(at, length)); break;
      case 4:
        bytes.insert(
            at,
            words[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(words.size())))]);
        break;
      default: {
        const std::string& word =
            words[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(words.size())))];
        bytes.replace(at, word.size(), word);
      }
    }
  }
  return bytes;
}

struct Outcome {
  int read = 0;
  int refused = 0;
};

/// Ten thousand damaged files: `read` reads each or throws Error, kIo or kUnsupported.
inline Outcome run_mutations(const std::vector<std::string>& corpus,
                             const std::vector<std::string>& words, std::uint64_t seed,
                             const std::function<void(const std::string& path)>& read) {
  MemoryFile file;
  Outcome outcome;
  Random random(seed);
  for (int i = 0; i < 10000; ++i) {
    file.set(mutated(corpus[static_cast<std::size_t>(i) % corpus.size()], words, random));
    try {
      read(file.path());
      ++outcome.read;
    } catch (const Error& error) {
      EXPECT_TRUE(error.code() == ErrorCode::kIo || error.code() == ErrorCode::kUnsupported)
          << error.what();
      ++outcome.refused;
    }
  }
  return outcome;
}

}  // namespace ladon::test
