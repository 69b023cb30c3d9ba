// libFuzzer over describe_model(): whatever the bytes of config.json, the model is described or
// refused with Error. Build with -DLADON_FUZZ=ON and clang; run on a folder of sound configs.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>

#include "io/io_support.h"
#include "io/memory_file.h"
#include "ladon/checkpoint.h"
#include "ladon/error.h"

namespace {

/// A folder whose config.json is in memory.
struct Folder {
  Folder() { std::filesystem::create_symlink(file.path(), temp / "config.json"); }

  ladon::test::MemoryFile file;
  ladon::test::TempFolder temp;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static Folder folder;
  folder.file.set({reinterpret_cast<const char*>(data), size});
  try {
    const ladon::ModelDescription model = ladon::describe_model(folder.temp.path());
    if (static_cast<std::size_t>(model.num_layers) != model.layers.size()) std::abort();
    if (model.num_heads % model.num_kv_heads != 0) std::abort();
  } catch (const ladon::Error&) {
  }
  return 0;
}
