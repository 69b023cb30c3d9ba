// A safetensors file whose tensors are written one after the other, so that they need not be in
// memory together.
#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/file.h"
#include "ladon/tensor.h"

namespace ladon::io {

/// A tensor that is to be written.
struct SafetensorsSpec {
  std::string name;
  DType dtype = DType::kF32;
  Dims shape{};
};

/// The order of the tensors in the file, as the format's own library writes them.
std::vector<std::size_t> safetensors_order(std::span<const SafetensorsSpec> tensors);

class SafetensorsWriter {
 public:
  /// Writes the header. Throws Error; `operation` begins its messages.
  SafetensorsWriter(std::string_view operation, const std::filesystem::path& path,
                    std::span<const SafetensorsSpec> tensors,
                    const std::map<std::string, std::string>& metadata = {});

  /// The tensors, in safetensors_order().
  void write(const ConstTensorView& tensor);
  /// When all are there, gives the file its name.
  void commit() { file_.commit(); }

 private:
  SafetensorsWriter(std::string_view operation, const std::filesystem::path& path,
                    const std::string& header);

  AtomicFile file_;
};

}  // namespace ladon::io
