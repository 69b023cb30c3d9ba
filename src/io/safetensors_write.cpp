#include <algorithm>
#include <cstddef>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/fail.h"
#include "core/integer.h"
#include "io/elements.h"
#include "io/file.h"
#include "io/safetensors_header.h"
#include "ladon/safetensors.h"

namespace ladon {
namespace {

using io::in_quotes;

constexpr std::string_view kOperation = "write_safetensors";

/// A text as JSON, escaped as the format's own library does.
std::string json_text(std::string_view argument, const std::string& text) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception&) {
    fail(kOperation, argument, "got " + in_quotes(text) + ", expected valid UTF-8");
  }
}

std::size_t rank_of_type(DType dtype) {
  const std::span<const io::SafetensorsType> types = io::safetensors_types();
  const auto found = std::find_if(types.begin(), types.end(), [&](const io::SafetensorsType& type) {
    return type.dtype == dtype;
  });
  return static_cast<std::size_t>(found - types.begin());
}

void check_items(std::span<const SafetensorsItem> tensors) {
  std::vector<std::string_view> names;
  for (const SafetensorsItem& item : tensors) {
    const std::string argument = "tensor " + in_quotes(item.name);
    io::check_can_be_written(kOperation, argument, item.view);
    if (item.name == "__metadata__") {
      fail(kOperation, argument, "got the format's own name for texts, expected another");
    }
    names.emplace_back(item.name);
  }
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice != names.end()) {
    fail(kOperation, "tensor " + in_quotes(*twice), "got it twice, expected it once");
  }
}

std::string header_text(std::span<const SafetensorsItem* const> items,
                        const std::map<std::string, std::string>& metadata) {
  std::string text = "{";
  if (!metadata.empty()) {
    text += "\"__metadata__\":{";
    for (const auto& [key, value] : metadata) {
      if (text.back() != '{') text += ',';
      text += json_text("metadata", key) + ':' + json_text("metadata", value);
    }
    text += '}';
  }
  std::size_t offset = 0;
  for (const SafetensorsItem* item : items) {
    if (text.size() > 1) text += ',';
    const ConstTensorView& view = item->view;
    text += json_text("tensors", item->name) + R"(:{"dtype":")";
    text += io::safetensors_types()[rank_of_type(view.dtype())].name;
    text += R"(","shape":[)";
    for (int dim = 0; dim < view.rank(); ++dim) {
      if (dim != 0) text += ',';
      text += std::to_string(view.size(dim));
    }
    const std::size_t begin = offset;
    offset += static_cast<std::size_t>(view.num_elements()) * size_of(view.dtype());
    text += R"(],"data_offsets":[)" + std::to_string(begin) + ',' + std::to_string(offset) + "]}";
  }
  text += '}';
  text.resize(round_up(text.size(), 8), ' ');
  if (text.size() > io::kMaxHeaderBytes) {
    fail(kOperation, "tensors",
         "got names and metadata of " + std::to_string(text.size()) + " bytes, expected at most " +
             std::to_string(io::kMaxHeaderBytes));
  }
  return text;
}

}  // namespace

void write_safetensors(const std::filesystem::path& path, std::span<const SafetensorsItem> tensors,
                       const std::map<std::string, std::string>& metadata) {
  check_items(tensors);
  std::vector<const SafetensorsItem*> items;
  items.reserve(tensors.size());
  for (const SafetensorsItem& item : tensors) items.push_back(&item);
  std::sort(items.begin(), items.end(), [](const SafetensorsItem* a, const SafetensorsItem* b) {
    const std::size_t rank_a = rank_of_type(a->view.dtype());
    const std::size_t rank_b = rank_of_type(b->view.dtype());
    return rank_a != rank_b ? rank_a > rank_b : a->name < b->name;
  });
  const std::string header = header_text(items, metadata);
  const std::uint64_t length = header.size();

  io::AtomicFile file(kOperation, path);
  file.write(&length, sizeof length);
  file.write(header.data(), header.size());
  for (const SafetensorsItem* item : items) io::write_elements(file, item->view);
  file.commit();
}

}  // namespace ladon
