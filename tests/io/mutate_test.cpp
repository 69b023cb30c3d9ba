// Thousands of damaged files, made from sound ones by a seeded generator: each is read or refused.
// The libFuzzer programs in tests/fuzz search the same readers without an end.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "io/io_support.h"
#include "io/memory_file.h"
#include "ladon/error.h"
#include "ladon/npy.h"
#include "ladon/random.h"
#include "ladon/safetensors.h"

namespace ladon {
namespace {

using namespace test;

/// One to four changes: of a byte, of a number or word, of the length, or a piece moved or doubled.
std::string mutated(std::string bytes, const std::vector<std::string>& words, Random& random) {
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

Outcome run(const std::vector<std::string>& corpus, const std::vector<std::string>& words,
            std::uint64_t seed, const std::function<void(const std::string& path)>& read) {
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

const std::vector<std::string> kJsonWords = {"0",
                                             "1",
                                             "-1",
                                             "18446744073709551615",
                                             "9223372036854775807",
                                             "1e9",
                                             "[",
                                             "]",
                                             "{",
                                             "}",
                                             ",",
                                             "\"dtype\":\"F32\"",
                                             "\"shape\":[2]",
                                             "\"F64\"",
                                             "\"I8\"",
                                             "null",
                                             ":",
                                             "\"",
                                             "\\u0061",
                                             "\xc3",
                                             "\"__metadata__\":{}",
                                             "\"F4\"",
                                             std::string(1, '\0')};

TEST(Mutations, Safetensors) {
  const TempFolder temp;
  const Tensor a = counting_bytes(DType::kF32, {2, 3});
  const Tensor b = counting_bytes(DType::kBF16, {5});
  const Tensor c = counting_bytes(DType::kU8, {});
  std::vector<std::string> corpus = {safetensors_bytes("{}")};
  const std::vector<SafetensorsItem> items = {{"a", a}, {"b", b}, {"c", c}};
  for (std::size_t count = 1; count <= items.size(); ++count) {
    write_safetensors(temp / "x", std::span(items).first(count), {{"format", "pt"}});
    corpus.push_back(read_bytes(temp / "x"));
  }
  const Outcome outcome = run(corpus, kJsonWords, 1, [](const std::string& path) {
    const SafetensorsFile file = SafetensorsFile::open(path);
    for (const SafetensorsEntry& entry : file.entries()) file.load(entry.name, DType::kF64);
  });
  // Both happen, or the changes are too gentle or too harsh to find anything.
  EXPECT_GT(outcome.read, 100);
  EXPECT_GT(outcome.refused, 5000);
}

TEST(Mutations, Index) {
  const TempFolder temp;
  write_safetensors(temp / "s",
                    std::vector<SafetensorsItem>{{"a", counting_bytes(DType::kU8, {2})}});
  const std::vector<std::string> corpus = {
      R"({"metadata":{"total_size":2},"weight_map":{"a":"s"}})",
      R"({"weight_map":{"a":"s","b":"t"}})"};
  const Outcome outcome = run(corpus, kJsonWords, 2, [&](const std::string& path) {
    std::filesystem::remove(temp / "model.safetensors.index.json");
    std::filesystem::create_symlink(path, temp / "model.safetensors.index.json");
    const ShardedSafetensors model = ShardedSafetensors::open(temp.path());
    for (const std::string& name : model.names()) model.load(name);
  });
  EXPECT_GT(outcome.read, 100);
  EXPECT_GT(outcome.refused, 5000);
}

TEST(Mutations, Npy) {
  const TempFolder temp;
  std::vector<std::string> corpus;
  for (const DType dtype : {DType::kF32, DType::kBool, DType::kI64}) {
    for (const Dims& shape : {Dims{}, Dims{3}, Dims{2, 3}}) {
      write_npy(temp / "x", counting_bytes(dtype, shape));
      std::string bytes = read_bytes(temp / "x");
      // Without the padding, more of the changes hit what matters.
      const std::size_t end = bytes.find("}") + 1;
      const std::size_t data = bytes.find('\n') + 1;
      bytes.erase(end, data - end);
      bytes[8] = static_cast<char>(end - 10);
      corpus.push_back(bytes);
    }
  }
  const std::vector<std::string> words = {
      "True", "False", "(", ")", ",",  "'",       "<f4",     ">i2",
      "|O",   "-1",    "0", "1", "2L", "'shape'", "'descr'", "9223372036854775807",
      "}",    "{",     " ", "\n"};
  const Outcome outcome = run(corpus, words, 3, [](const std::string& path) { read_npy(path); });
  EXPECT_GT(outcome.read, 100);
  EXPECT_GT(outcome.refused, 5000);
}

TEST(Mutations, Npz) {
  const std::filesystem::path source = conformance_folder("npy_cases") / "candle_test.npz";
  if (!std::filesystem::exists(source)) GTEST_SKIP() << "no " << source;
  const std::vector<std::string> words = {"PK\x01\x02", "PK\x03\x04", "PK\x05\x06",
                                          std::string(4, '\0'), "\xff\xff\xff\xff"};
  const Outcome outcome =
      run({read_bytes(source)}, words, 4, [](const std::string& path) { read_npz(path); });
  EXPECT_GT(outcome.refused, 5000);
}

}  // namespace
}  // namespace ladon
