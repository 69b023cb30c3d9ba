#include "conformance/safetensors_fixture.h"

#include <bit>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <span>
#include <stdexcept>
#include <utility>

namespace ladon::conformance {
namespace {

using nlohmann::json;

// The format is little-endian, and the bytes below are read in place.
static_assert(std::endian::native == std::endian::little);

[[noreturn]] void fail(const std::string& message) {
  throw std::runtime_error("conformance vectors: " + message);
}

std::vector<char> read_whole_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) fail("cannot open " + path.string());
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

/// A safetensors file: an 8-byte header length, a JSON header, then the tensors' bytes.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path) : bytes_(read_whole_file(path)) {
    std::uint64_t header_length = 0;
    if (bytes_.size() < sizeof header_length) fail("the file is shorter than its header length");
    std::memcpy(&header_length, bytes_.data(), sizeof header_length);
    if (header_length > bytes_.size() - sizeof header_length) fail("the header passes the end");
    const std::span<const char> rest = std::span<const char>(bytes_).subspan(sizeof header_length);
    const std::span<const char> text = rest.first(static_cast<std::size_t>(header_length));
    header_ = json::parse(text.begin(), text.end());
    data_ = rest.subspan(text.size());
  }
  // data_ points into bytes_.
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  bool is_integer(const std::string& name) const { return entry(name).at("dtype") == "I64"; }

  std::vector<std::int64_t> integers(const std::string& name) const {
    const Dims shape = shape_of(name);
    std::int64_t count = 1;
    for (const std::int64_t size : shape) count *= size;
    std::vector<std::int64_t> values(static_cast<std::size_t>(count));
    copy_bytes(name, values.data(), values.size() * sizeof(std::int64_t));
    return values;
  }

  // Copied, because the file's offsets are not aligned to the element size.
  Tensor tensor(const std::string& name) const {
    Tensor result = Tensor::uninitialized(dtype_of(name), shape_of(name));
    const std::size_t count = static_cast<std::size_t>(result.num_elements());
    copy_bytes(name, result.data(), count * size_of(result.dtype()));
    return result;
  }

 private:
  const json& entry(const std::string& name) const {
    const auto found = header_.find(name);
    if (found == header_.end()) fail("no tensor " + name);
    return *found;
  }

  Dims shape_of(const std::string& name) const {
    return Dims(entry(name).at("shape").get<std::vector<std::int64_t>>());
  }

  DType dtype_of(const std::string& name) const {
    const std::string text = entry(name).at("dtype").get<std::string>();
    if (text == "F64") return DType::kF64;
    if (text == "F32") return DType::kF32;
    if (text == "F16") return DType::kF16;
    if (text == "BF16") return DType::kBF16;
    if (text == "BOOL") return DType::kBool;
    fail(name + " has dtype " + text);
  }

  void copy_bytes(const std::string& name, void* to, std::size_t num_bytes) const {
    const auto [begin, end] =
        entry(name).at("data_offsets").get<std::pair<std::size_t, std::size_t>>();
    if (begin > end || end > data_.size()) fail(name + " is outside the file");
    if (end - begin != num_bytes) fail(name + " has a shape that does not fit its bytes");
    if (num_bytes != 0) std::memcpy(to, data_.data() + begin, num_bytes);
  }

  std::vector<char> bytes_;
  json header_;
  std::span<const char> data_;
};

OnnxCase read_case(const json& description, const SafetensorsFile& tensors) {
  OnnxCase result;
  result.name = description.at("name").get<std::string>();
  result.op = description.at("op").get<std::string>();
  result.opset = description.at("opset").get<std::int64_t>();
  result.attributes = description.at("attributes").get<std::map<std::string, double>>();
  for (const std::string& slot : description.at("inputs").get<std::vector<std::string>>()) {
    if (slot.empty()) continue;
    const std::string tensor_name = result.name + "/in/" + slot;
    if (tensors.is_integer(tensor_name)) {
      result.integer_inputs.emplace(slot, tensors.integers(tensor_name));
    } else {
      result.inputs.emplace(slot, tensors.tensor(tensor_name));
    }
  }
  for (const std::string& slot : description.at("outputs").get<std::vector<std::string>>()) {
    if (slot.empty()) continue;
    result.expected.emplace(slot, tensors.tensor(result.name + "/out/" + slot));
  }
  return result;
}

}  // namespace

std::optional<double> OnnxCase::attribute(const std::string& attribute_name) const {
  const auto found = attributes.find(attribute_name);
  if (found == attributes.end()) return std::nullopt;
  return found->second;
}

std::int64_t OnnxCase::integer_attribute(const std::string& attribute_name) const {
  const std::optional<double> value = attribute(attribute_name);
  if (!value) fail(name + " has no attribute " + attribute_name);
  return static_cast<std::int64_t>(*value);
}

bool OnnxCase::flag(const std::string& attribute_name) const {
  return attribute(attribute_name).value_or(0) != 0;
}

ConstTensorView OnnxCase::input(const std::string& slot) const {
  const auto found = inputs.find(slot);
  if (found == inputs.end()) return {};
  return found->second.view();
}

std::filesystem::path conformance_dir() {
  const char* chosen = std::getenv("LADON_CONFORMANCE_DIR");
  if (chosen != nullptr && *chosen != '\0') return chosen;
  return std::filesystem::path(LADON_SOURCE_DIR) / ".." / "shared" / "conformance";
}

std::filesystem::path onnx_cases_path(const std::filesystem::path& dir) {
  return dir / "onnx_attention.json";
}

std::filesystem::path onnx_tensors_path(const std::filesystem::path& dir) {
  return dir / "onnx_attention.safetensors";
}

std::vector<OnnxCase> read_onnx_suite(const std::filesystem::path& dir) {
  const SafetensorsFile tensors(onnx_tensors_path(dir));
  const std::vector<char> text = read_whole_file(onnx_cases_path(dir));
  const json suite = json::parse(text.begin(), text.end());
  std::vector<OnnxCase> cases;
  for (const json& description : suite.at("cases")) {
    cases.push_back(read_case(description, tensors));
  }
  return cases;
}

}  // namespace ladon::conformance
