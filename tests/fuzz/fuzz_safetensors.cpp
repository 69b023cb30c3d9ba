// libFuzzer over SafetensorsFile: whatever the bytes, the file is read or refused with Error.
// Build with -DLADON_FUZZ=ON and clang; run on a folder of sound files.
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "io/memory_file.h"
#include "ladon/error.h"
#include "ladon/safetensors.h"

namespace {

/// What passes can be asked for everything.
void use(const ladon::SafetensorsFile& file) {
  std::uint64_t total = 0;
  for (const ladon::SafetensorsEntry& entry : file.entries()) {
    total += entry.num_bytes;
    if (!file.has(entry.name)) std::abort();
    if (!entry.dtype || entry.shape.size() > static_cast<std::size_t>(ladon::kMaxRank)) continue;
    const ladon::Tensor converted = file.load(entry.name, ladon::DType::kF64);
    if (file.load(entry.name).num_elements() != converted.num_elements()) std::abort();
  }
  if (total > 1U << 20U) std::abort();  // more than an input can hold
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static ladon::test::MemoryFile file;
  file.set({reinterpret_cast<const char*>(data), size});
  try {
    use(ladon::SafetensorsFile::open(file.path()));
  } catch (const ladon::Error&) {
  }
  return 0;
}
