// libFuzzer over KvCache::load(): whatever the bytes, they are loaded or refused with Error, and
// what is refused changes nothing. Build with -DLADON_FUZZ=ON and clang; run on a folder of sound
// files (cache_mutate_test writes them where LADON_CORPUS says).
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "cache/cache_file_support.h"
#include "cache/cache_loader.h"
#include "io/memory_file.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static ladon::test::MemoryFile file;
  static ladon::test::CacheLoader loader;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  file.set(bytes);
  loader.load(file.path(), size);
  // The checksum stops nearly all of them: with one that fits, the rest is searched too.
  file.set(ladon::test::with_right_checksum(bytes));
  loader.load(file.path(), size);
  return 0;
}
