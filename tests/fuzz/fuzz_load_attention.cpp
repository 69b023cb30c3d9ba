// libFuzzer over load_attention(): whatever the bytes of config.json and model.safetensors, a layer
// is made or refused with Error. The input is the config, a line with nothing but "---", and the
// tensors. Build with -DLADON_FUZZ=ON and clang, or see fuzz_driver.cpp.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string_view>

#include "io/io_support.h"
#include "io/memory_file.h"
#include "ladon/checkpoint.h"
#include "ladon/error.h"

namespace {

/// A folder whose files are in memory.
struct Folder {
  Folder() {
    std::filesystem::create_symlink(config.path(), temp / "config.json");
    std::filesystem::create_symlink(tensors.path(), temp / "model.safetensors");
  }

  ladon::test::MemoryFile config, tensors;
  ladon::test::TempFolder temp;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static Folder folder;
  static const ladon::Context context({.num_threads = 1});
  constexpr std::string_view kBetween = "\n---\n";
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const std::size_t end = bytes.find(kBetween);
  if (end == std::string_view::npos) return 0;
  folder.config.set(bytes.substr(0, end));
  folder.tensors.set(bytes.substr(end + kBetween.size()));
  try {
    // A config can describe a layer of any size, and a layer is made before its tensors are found.
    const ladon::ModelDescription model = ladon::describe_model(folder.temp.path());
    if (model.embed_dim > 256 || model.num_heads > 64) return 0;
    const auto layer = ladon::load_attention(context, folder.temp.path(), 0);
    if (layer->embed_dim() != model.embed_dim) std::abort();
  } catch (const ladon::Error&) {
  }
  return 0;
}
