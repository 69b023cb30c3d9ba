// One layer out of a large sharded checkpoint: only that layer's bytes are read, and memory holds
// that layer and no more. The checkpoint is sparse but for the layer; LADON_LARGE_CHECKPOINT_MIB
// sets its size (4096 for 4 GiB), which is small otherwise. Prints what it measured.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "io/io_support.h"
#include "ladon/checkpoint.h"
#include "ladon/random.h"
#include "support/host_context.h"
#include "support/sanitized.h"

namespace ladon::test {
namespace {

constexpr std::int64_t kMiB = 1 << 20;

/// The number behind a name in a file of "name: number" lines; -1 where there is none.
std::int64_t number_in(const char* path, const std::string& name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(name + ":")) return std::atoll(line.c_str() + name.size() + 1);
  }
  return -1;
}

/// Bytes that this process has asked the system to read, by any read call.
std::int64_t bytes_read() { return number_in("/proc/self/io", "rchar"); }
std::int64_t resident_bytes() { return 1024 * number_in("/proc/self/status", "VmRSS"); }
std::int64_t peak_bytes() { return 1024 * number_in("/proc/self/status", "VmHWM"); }
std::int64_t file_bytes_resident() { return 1024 * number_in("/proc/self/status", "RssFile"); }

struct Stored {
  std::string name;
  Dims shape;
  const Tensor* value = nullptr;  // null: a hole
};

/// A shard with bf16 tensors; returns the bytes that a reader needs to know it.
std::int64_t write_shard(const std::filesystem::path& path, const std::vector<Stored>& tensors) {
  std::string header = "{";
  std::int64_t offset = 0;
  std::vector<std::int64_t> starts;
  for (const Stored& tensor : tensors) {
    std::int64_t count = 2;
    std::string shape;
    for (const std::int64_t size : tensor.shape) {
      count *= size;
      shape += (shape.empty() ? "" : ",") + std::to_string(size);
    }
    header += (header.size() > 1 ? ",\"" : "\"") + tensor.name + R"(":{"dtype":"BF16","shape":[)" +
              shape + R"(],"data_offsets":[)" + std::to_string(offset) + "," +
              std::to_string(offset + count) + "]}";
    starts.push_back(offset);
    offset += count;
  }
  header += "}";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  write_bytes(path, safetensors_bytes(header));
  const auto data = static_cast<std::int64_t>(header.size()) + 8;
  std::filesystem::resize_file(path, static_cast<std::uintmax_t>(data + offset));
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].value == nullptr) continue;
    file.seekp(data + starts[i]);
    file.write(static_cast<const char*>(tensors[i].value->data()),
               2 * tensors[i].value->num_elements());
  }
  EXPECT_TRUE(file.flush());
  return data;
}

TEST(LargeCheckpoint, LoadingALayerTouchesThatLayerAlone) {
  const char* const wanted = std::getenv("LADON_LARGE_CHECKPOINT_MIB");
  const std::int64_t total = (wanted != nullptr ? std::max(64, std::atoi(wanted)) : 256) * kMiB;
  const bool large = total >= 1024 * kMiB;
  const std::int64_t layers = 16;
  const std::int64_t embed = large ? 4096 : 512;
  const std::int64_t kv_width = embed / 4;
  const std::int64_t chosen = 5;
  const TempFolder temp;
  write_bytes(temp / "config.json",
              R"({"model_type":"llama","num_hidden_layers":)" + std::to_string(layers) +
                  R"(,"num_attention_heads":32,"num_key_value_heads":8,"hidden_size":)" +
                  std::to_string(embed) + "}");

  const std::vector<std::pair<std::string, Dims>> weights = {{"q_proj.weight", {embed, embed}},
                                                             {"k_proj.weight", {kv_width, embed}},
                                                             {"v_proj.weight", {kv_width, embed}},
                                                             {"o_proj.weight", {embed, embed}}};
  std::vector<Tensor> values;
  std::int64_t layer_bytes = 0;
  for (const auto& [name, shape] : weights) {
    values.emplace_back(DType::kBF16, shape);
    fill_normal(host_context(), values.back(), 0, 1, 1, values.size());
    layer_bytes += 2 * values.back().num_elements();
  }
  std::string index = R"({"weight_map":{)";
  std::int64_t header_bytes = 0;
  std::int64_t total_bytes = 0;
  for (std::int64_t layer = 0; layer < layers; ++layer) {
    const std::string shard = "model-" + std::to_string(layer) + ".safetensors";
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    std::vector<Stored> tensors = {
        {prefix + "mlp.up_proj.weight", {(total / layers - layer_bytes) / 2}}};
    for (std::size_t i = 0; i < weights.size(); ++i) {
      tensors.push_back({prefix + "self_attn." + weights[i].first, weights[i].second,
                         layer == chosen ? &values[i] : nullptr});
    }
    const std::int64_t header = write_shard(temp / shard, tensors);
    if (layer == chosen) header_bytes = header;
    total_bytes += static_cast<std::int64_t>(std::filesystem::file_size(temp / shard));
    for (const Stored& tensor : tensors) {
      index += (index.back() == '{' ? "\"" : ",\"") + tensor.name + "\":\"" + shard + "\"";
    }
  }
  write_bytes(temp / "model.safetensors.index.json", index + "}}");
  const std::string sample = bytes_of(values[1].view().slice(0, 0, 1));
  values.clear();

  // The peak is counted from here on, where the system allows it.
  std::ofstream("/proc/self/clear_refs") << "5";
  const std::int64_t read_before = bytes_read();
  const std::int64_t resident_before = resident_bytes();
  const std::int64_t files_before = file_bytes_resident();
  const auto start = std::chrono::steady_clock::now();
  const auto layer = load_attention(host_context(), temp.path(), chosen);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  const std::int64_t read = bytes_read() - read_before;
  const std::int64_t resident = resident_bytes() - resident_before;
  const std::int64_t peak = peak_bytes() - resident_before;
  const std::int64_t mapped = file_bytes_resident() - files_before;

  const auto mib = [](std::int64_t bytes) { return static_cast<double>(bytes) / double(kMiB); };
  std::printf(
      "checkpoint %.0f MiB in %lld shards, layer %.1f MiB: read %.1f MiB, resident memory grew by "
      "%.1f MiB (peak %.1f MiB, of mapped files %.1f MiB), %.3f s\n",
      mib(total_bytes), static_cast<long long>(layers), mib(layer_bytes), mib(read), mib(resident),
      mib(peak), mib(mapped), seconds.count());
  EXPECT_EQ(bytes_of(layer->parameter("k_proj.weight").value.view().slice(0, 0, 1)), sample);
  EXPECT_GE(total_bytes, total - kMiB);
  if (read_before >= 0) {
    // The layer, one shard's header, the index and the config; what /proc itself costs is small.
    const auto small = static_cast<std::int64_t>(index.size()) + header_bytes + 64 * 1024;
    EXPECT_GE(read, layer_bytes);
    EXPECT_LE(read, layer_bytes + small);
  }
  if (kSanitized) return;
  // The weights, and space for one tensor on its way.
  EXPECT_LE(resident, layer_bytes + 2 * embed * embed + 16 * kMiB);
  EXPECT_LE(mapped, 4 * kMiB);
}

}  // namespace
}  // namespace ladon::test
