#include <algorithm>
#include <cstddef>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "core/fail.h"
#include "core/integer.h"
#include "io/elements.h"
#include "io/file.h"
#include "io/safetensors_header.h"
#include "io/safetensors_writer.h"
#include "ladon/safetensors.h"

namespace ladon {
namespace io {
namespace {

/// A text as JSON, escaped as the format's own library does.
std::string json_text(std::string_view operation, std::string_view argument,
                      const std::string& text) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception&) {
    fail(operation, argument, "got " + in_quotes(text) + ", expected valid UTF-8");
  }
}

std::size_t rank_of_type(DType dtype) {
  const std::span<const SafetensorsType> types = safetensors_types();
  const auto found = std::find_if(types.begin(), types.end(),
                                  [&](const SafetensorsType& type) { return type.dtype == dtype; });
  return static_cast<std::size_t>(found - types.begin());
}

void check_names(std::string_view operation, std::span<const SafetensorsSpec> tensors) {
  std::vector<std::string_view> names;
  for (const SafetensorsSpec& tensor : tensors) {
    if (tensor.name == "__metadata__") {
      fail(operation, "tensor " + in_quotes(tensor.name),
           "got the format's own name for texts, expected another");
    }
    names.emplace_back(tensor.name);
  }
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice != names.end()) {
    fail(operation, "tensor " + in_quotes(*twice), "got it twice, expected it once");
  }
}

std::string header_text(std::string_view operation, std::span<const SafetensorsSpec> tensors,
                        const std::map<std::string, std::string>& metadata) {
  std::string text = "{";
  if (!metadata.empty()) {
    text += "\"__metadata__\":{";
    for (const auto& [key, value] : metadata) {
      if (text.back() != '{') text += ',';
      text += json_text(operation, "metadata", key) + ':' + json_text(operation, "metadata", value);
    }
    text += '}';
  }
  std::size_t offset = 0;
  for (const std::size_t i : safetensors_order(tensors)) {
    const SafetensorsSpec& tensor = tensors[i];
    if (text.size() > 1) text += ',';
    text += json_text(operation, "tensors", tensor.name) + R"(:{"dtype":")";
    text += safetensors_types()[rank_of_type(tensor.dtype)].name;
    text += R"(","shape":[)";
    const std::size_t begin = offset;
    std::size_t num_bytes = size_of(tensor.dtype);
    for (int dim = 0; dim < tensor.shape.rank(); ++dim) {
      if (dim != 0) text += ',';
      text += std::to_string(tensor.shape[dim]);
      num_bytes *= static_cast<std::size_t>(tensor.shape[dim]);
    }
    offset += num_bytes;
    text += R"(],"data_offsets":[)" + std::to_string(begin) + ',' + std::to_string(offset) + "]}";
  }
  text += '}';
  text.resize(round_up(text.size(), 8), ' ');
  if (text.size() > kMaxHeaderBytes) {
    fail(operation, "tensors",
         "got names and metadata of " + std::to_string(text.size()) + " bytes, expected at most " +
             std::to_string(kMaxHeaderBytes));
  }
  return text;
}

/// Checks everything before the file is opened.
std::string checked_header(std::string_view operation, std::span<const SafetensorsSpec> tensors,
                           const std::map<std::string, std::string>& metadata) {
  check_names(operation, tensors);
  return header_text(operation, tensors, metadata);
}

}  // namespace

std::vector<std::size_t> safetensors_order(std::span<const SafetensorsSpec> tensors) {
  std::vector<std::size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    const std::size_t rank_a = rank_of_type(tensors[a].dtype);
    const std::size_t rank_b = rank_of_type(tensors[b].dtype);
    return rank_a != rank_b ? rank_a > rank_b : tensors[a].name < tensors[b].name;
  });
  return order;
}

SafetensorsWriter::SafetensorsWriter(std::string_view operation, const std::filesystem::path& path,
                                     std::span<const SafetensorsSpec> tensors,
                                     const std::map<std::string, std::string>& metadata)
    : SafetensorsWriter(operation, path, checked_header(operation, tensors, metadata)) {}

SafetensorsWriter::SafetensorsWriter(std::string_view operation, const std::filesystem::path& path,
                                     const std::string& header)
    : file_(operation, path) {
  const std::uint64_t length = header.size();
  file_.write(&length, sizeof length);
  file_.write(header.data(), header.size());
}

void SafetensorsWriter::write(const ConstTensorView& tensor) { write_elements(file_, tensor); }

}  // namespace io

void write_safetensors(const std::filesystem::path& path, std::span<const SafetensorsItem> tensors,
                       const std::map<std::string, std::string>& metadata) {
  constexpr std::string_view kOperation = "write_safetensors";
  std::vector<io::SafetensorsSpec> specs;
  specs.reserve(tensors.size());
  for (const SafetensorsItem& item : tensors) {
    io::check_can_be_written(kOperation, "tensor " + io::in_quotes(item.name), item.view);
    specs.push_back({item.name, item.view.dtype(), item.view.shape()});
  }
  io::SafetensorsWriter writer(kOperation, path, specs, metadata);
  for (const std::size_t i : io::safetensors_order(specs)) writer.write(tensors[i].view);
  writer.commit();
}

}  // namespace ladon
