// Thousands of damaged files, made from sound ones by a seeded generator: each is read or refused.
// The libFuzzer programs in tests/fuzz search the same readers without an end.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "io/io_support.h"
#include "io/mutations.h"
#include "ladon/npy.h"
#include "ladon/safetensors.h"

namespace ladon {
namespace {

using namespace test;

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
  const Outcome outcome = run_mutations(corpus, kJsonWords, 1, [](const std::string& path) {
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
  const Outcome outcome = run_mutations(corpus, kJsonWords, 2, [&](const std::string& path) {
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
  const Outcome outcome =
      run_mutations(corpus, words, 3, [](const std::string& path) { read_npy(path); });
  EXPECT_GT(outcome.read, 100);
  EXPECT_GT(outcome.refused, 5000);
}

TEST(Mutations, Npz) {
  const std::filesystem::path source = conformance_folder("npy_cases") / "candle_test.npz";
  if (!std::filesystem::exists(source)) GTEST_SKIP() << "no " << source;
  const std::vector<std::string> words = {"PK\x01\x02", "PK\x03\x04", "PK\x05\x06",
                                          std::string(4, '\0'), "\xff\xff\xff\xff"};
  const Outcome outcome = run_mutations({read_bytes(source)}, words, 4,
                                        [](const std::string& path) { read_npz(path); });
  EXPECT_GT(outcome.refused, 5000);
}

}  // namespace
}  // namespace ladon
