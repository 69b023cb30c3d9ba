#include "models/model_folder.h"

#include <algorithm>
#include <stdexcept>

#include "io/io_support.h"
#include "ladon/random.h"
#include "ladon/safetensors.h"
#include "support/host_context.h"

namespace ladon::test {
namespace {

std::string with_layer(std::string prefix, int layer) {
  return prefix.replace(prefix.find('%'), 1, std::to_string(layer));
}

}  // namespace

Tensor TensorMaker::make(const Dims& shape, double spread, double middle) {
  Tensor narrow(DType::kF32, shape);
  fill_normal(host_context(), narrow, middle, spread, seed_, stream_++);
  return Tensor::copy_of(host_context(), narrow, DType::kF64);
}

double PlainLinear::operator()(const std::vector<double>& x, int row) const {
  const double* const numbers = weight->data_as<double>();
  const auto width = x.size();
  const auto rows = static_cast<std::size_t>(weight->num_elements()) / width;
  const auto index = static_cast<std::size_t>(row);
  double sum = bias == nullptr ? 0 : bias->data_as<double>()[index];
  for (std::size_t i = 0; i < width; ++i) {
    sum += x[i] * (transposed ? numbers[i * rows + index] : numbers[index * width + i]);
  }
  return sum;
}

const Tensor* find_tensor(const TensorMap& tensors, const std::string& name) {
  const auto found = tensors.find(name);
  return found == tensors.end() ? nullptr : &found->second;
}

const Tensor* tensor_at(const TensorMap& tensors, const std::string& name) {
  const Tensor* const tensor = find_tensor(tensors, name);
  if (tensor == nullptr) throw std::runtime_error("the case has no " + name);
  return tensor;
}

std::vector<double> numbers_of(const Tensor& tensor) {
  return {tensor.data_as<double>(), tensor.data_as<double>() + tensor.num_elements()};
}

FamilyCase family_case(const std::string& name) {
  for (FamilyCase& setup : family_cases()) {
    if (setup.name == name) return std::move(setup);
  }
  throw std::runtime_error("no case " + name);
}

std::vector<std::pair<std::string, std::string>> layer_names(const FamilyCase& setup, int layer) {
  std::vector<std::pair<std::string, std::string>> names;
  const std::string prefix = with_layer(setup.prefix_in_file, layer);
  for (const auto& [name, tensor] : setup.tensors) {
    if (!name.starts_with(prefix)) continue;
    const std::string rest = name.substr(prefix.size());
    if (std::find(setup.other_tensors.begin(), setup.other_tensors.end(), rest) !=
        setup.other_tensors.end()) {
      continue;
    }
    names.emplace_back(name, with_layer(setup.prefix_saved, layer) + rest);
  }
  return names;
}

void write_tensors(const std::filesystem::path& folder, const TensorMap& tensors, DType dtype) {
  std::vector<Tensor> converted;
  std::vector<SafetensorsItem> items;
  for (const auto& [name, tensor] : tensors) {
    converted.push_back(Tensor::copy_of(host_context(), tensor, dtype));
    items.push_back({name, {}});
  }
  for (std::size_t i = 0; i < items.size(); ++i) items[i].view = converted[i];
  write_safetensors(folder / "model.safetensors", items, {{"format", "pt"}});
}

void write_model(const std::filesystem::path& folder, const FamilyCase& setup, DType dtype,
                 bool sharded) {
  write_bytes(folder / "config.json", setup.config);
  if (!sharded) {
    write_tensors(folder, setup.tensors, dtype);
    return;
  }
  // Every second tensor in the other file, so that a layer is spread over both.
  const std::string names[2] = {"model-00001-of-00002.safetensors",
                                "model-00002-of-00002.safetensors"};
  std::string index = "{\"metadata\":{},\"weight_map\":{";
  std::vector<Tensor> converted[2];
  std::vector<SafetensorsItem> items[2];
  std::size_t count = 0;
  for (const auto& [name, tensor] : setup.tensors) {
    const std::size_t shard = count++ % 2;
    converted[shard].push_back(Tensor::copy_of(host_context(), tensor, dtype));
    items[shard].push_back({name, {}});
    index += (count == 1 ? "\"" : ",\"") + name + "\":\"" + names[shard] + "\"";
  }
  for (std::size_t shard = 0; shard < 2; ++shard) {
    for (std::size_t i = 0; i < items[shard].size(); ++i)
      items[shard][i].view = converted[shard][i];
    write_safetensors(folder / names[shard], items[shard], {{"format", "pt"}});
  }
  write_bytes(folder / "model.safetensors.index.json", index + "}}");
}

}  // namespace ladon::test
