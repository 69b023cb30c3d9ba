// libFuzzer over read_npy() and read_npz(): whatever the bytes, the file is read or refused with
// Error. Build with -DLADON_FUZZ=ON and clang; run on a folder of sound files.
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "io/memory_file.h"
#include "ladon/error.h"
#include "ladon/npy.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static ladon::test::MemoryFile file;
  file.set({reinterpret_cast<const char*>(data), size});
  try {
    const ladon::Tensor array = ladon::read_npy(file.path());
    const auto elements = static_cast<std::size_t>(array.num_elements());
    if (elements * ladon::size_of(array.dtype()) > size) std::abort();
  } catch (const ladon::Error&) {
  }
  try {
    std::size_t total = 0;
    for (const auto& [name, array] : ladon::read_npz(file.path())) {
      total += static_cast<std::size_t>(array.num_elements()) * ladon::size_of(array.dtype());
    }
    if (total > size) std::abort();
  } catch (const ladon::Error&) {
  }
  return 0;
}
