// Thousands of damaged cache files, made from sound ones by a seeded generator, as they are and
// with a checksum that fits: each is loaded or refused. fuzz_kv_cache searches the same without an
// end.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "cache/cache_file_support.h"
#include "cache/cache_loader.h"
#include "io/io_support.h"
#include "io/memory_file.h"
#include "ladon/random.h"
#include "support/host_context.h"

namespace ladon::test {
namespace {

/// Sound files of the loader's caches, short and long. Written to the folder that LADON_CORPUS
/// names, if it does, for the fuzzer to begin with.
std::vector<std::string> corpus() {
  const TempFolder folder;
  const char* const named = std::getenv("LADON_CORPUS");
  std::vector<std::string> files;
  CacheLoader loader;
  for (const KvCache& like : loader.caches()) {
    for (const std::vector<std::int64_t>& counts :
         {std::vector<std::int64_t>{0, 0}, {1, 0}, {0, 3}, {4, 9}, {12, 12}}) {
      KvCache cache = like.fork(host_context());
      append_random(cache, counts, 1);
      cache.save(host_context(), folder / "cache");
      files.push_back(read_bytes(folder / "cache"));
      if (named == nullptr) continue;
      write_bytes(std::filesystem::path(named) / ("cache-" + std::to_string(files.size())),
                  files.back());
    }
  }
  return files;
}

/// One to four changes: of a byte, of a length or a size, of the file's length, or a piece moved.
std::string mutated(std::string bytes, Random& random) {
  const auto place = [&](std::size_t bound) {
    return static_cast<std::size_t>(random.below(static_cast<std::int64_t>(bound) + 1));
  };
  for (std::int64_t change = random.below(4); change >= 0; --change) {
    const std::size_t at = place(bytes.size());
    switch (random.below(6)) {
      case 0:
        if (at < bytes.size()) bytes[at] = static_cast<char>(random.below(256));
        break;
      case 1: bytes.erase(at, place(16)); break;
      case 2: bytes.insert(place(bytes.size()), bytes.substr(at, place(24))); break;
      case 3: bytes.insert(at, std::string(place(24), '\0')); break;
      default: {
        // The words of the header: sizes, first tokens, lengths.
        const std::int64_t numbers[] = {0,        1, 2, 3, 4, 5, -1, 1LL << 40, (1LL << 40) + 1,
                                        1LL << 62};
        std::string word;
        add_number(word, numbers[random.below(10)]);
        const std::size_t start = 16 + 8 * place(8);
        if (start + 8 <= bytes.size()) bytes.replace(start, 8, word);
      }
    }
  }
  return bytes;
}

TEST(CacheMutations, AreLoadedOrRefused) {
  const std::vector<std::string> files = corpus();
  MemoryFile file;
  CacheLoader loader;
  for (const std::string& sound : files) {
    file.set(sound);
    EXPECT_GT(loader.load(file.path(), sound.size()).read, 0);
  }
  Random random(6);
  for (const bool fitting : {false, true}) {
    CacheLoader::Outcome all;
    for (std::size_t i = 0; i < 6000; ++i) {
      std::string bytes = mutated(files[i % files.size()], random);
      if (fitting) bytes = with_right_checksum(bytes);
      file.set(bytes);
      const CacheLoader::Outcome outcome = loader.load(file.path(), bytes.size());
      all.read += outcome.read;
      all.refused += outcome.refused;
    }
    // Both happen, or the changes are too gentle or too harsh to find anything.
    EXPECT_GT(all.read, fitting ? 300 : 10);
    EXPECT_GT(all.refused, 10000);
  }
}

}  // namespace
}  // namespace ladon::test
