// What the tests of files share: a folder that goes away, whole files as bytes, and safetensors
// files put together by hand.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "ladon/tensor.h"
#include "support/host_context.h"
#include "support/temp_folder.h"

namespace ladon::test {

inline constexpr std::array kAllDTypes = {
    DType::kF64, DType::kF32, DType::kF16, DType::kBF16, DType::kBool, DType::kI8, DType::kU8,
    DType::kI16, DType::kU16, DType::kI32, DType::kU32,  DType::kI64,  DType::kU64};

inline std::string read_bytes(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path.string());
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

inline void write_bytes(const std::filesystem::path& path, std::string_view bytes) {
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (!file.flush()) throw std::runtime_error("cannot write " + path.string());
}

/// Length, header, data.
inline std::string safetensors_bytes(std::string_view header, std::string_view data = {}) {
  const std::uint64_t length = header.size();
  std::string bytes(sizeof length, '\0');
  std::memcpy(bytes.data(), &length, sizeof length);
  return bytes.append(header).append(data);
}

/// The bytes of the elements.
inline std::string bytes_of(const ConstTensorView& view) {
  const Tensor dense = Tensor::copy_of(host_context(), view);
  const auto count = static_cast<std::size_t>(dense.num_elements()) * size_of(dense.dtype());
  return count == 0 ? std::string() : std::string(static_cast<const char*>(dense.data()), count);
}

/// 0, 1, 2, ... as bytes, so that every bit of an element matters. Bools are 0 and 1.
inline Tensor counting_bytes(DType dtype, const Dims& shape, unsigned start = 0) {
  Tensor tensor(dtype, shape);
  const auto count = static_cast<std::size_t>(tensor.num_elements()) * size_of(dtype);
  auto* bytes = static_cast<unsigned char*>(tensor.data());
  for (std::size_t i = 0; i < count; ++i) {
    bytes[i] = static_cast<unsigned char>(start + i * 37);
    if (dtype == DType::kBool) bytes[i] &= 1U;
  }
  return tensor;
}

struct IndexLine {
  std::string file;
  std::string expected;
};

/// LADON_CONFORMANCE_DIR if that is set, else ../shared/conformance next to the project.
inline std::filesystem::path conformance_folder(const std::string& name) {
  const char* chosen = std::getenv("LADON_CONFORMANCE_DIR");
  const std::filesystem::path folder =
      chosen != nullptr && *chosen != '\0'
          ? std::filesystem::path(chosen)
          : std::filesystem::path(LADON_SOURCE_DIR) / ".." / "shared" / "conformance";
  return folder / name;
}

/// The lines of INDEX.tsv: file, bytes, what must happen. Checks the bytes. Empty when absent.
inline std::vector<IndexLine> read_conformance_index(const std::filesystem::path& folder) {
  std::vector<IndexLine> lines;
  std::ifstream index(folder / "INDEX.tsv");
  for (std::string line; std::getline(index, line);) {
    if (line.empty() || line.front() == '#') continue;
    std::istringstream fields(line);
    IndexLine entry;
    std::string size;
    std::getline(fields, entry.file, '\t');
    std::getline(fields, size, '\t');
    std::getline(fields, entry.expected);
    EXPECT_EQ(std::filesystem::file_size(folder / entry.file), std::stoull(size)) << entry.file;
    lines.push_back(entry);
  }
  return lines;
}

}  // namespace ladon::test
