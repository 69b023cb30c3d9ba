// torch.nn.MultiheadAttention: its state has no config, so the tensors themselves say what it is.
#include <string>

#include "core/fail.h"
#include "io/file.h"
#include "ladon/checkpoint.h"
#include "layers/multi_head.h"
#include "models/stored_tensors.h"

namespace ladon {
namespace {

constexpr std::string_view kLoad = "load_torch_attention";
constexpr std::string_view kSave = "torch_attention_tensors";

/// The width of a weight's input; throws where it is not a matrix.
std::int64_t input_width(const models::TensorSource& source, const std::string& name) {
  if (!source.has(name)) {
    fail(ErrorCode::kIo, kLoad, source.path() + ": tensor " + io::in_quotes(name),
         "got none, expected a matrix");
  }
  const SafetensorsEntry& entry = source.entry(name);
  if (entry.shape.size() != 2) {
    fail(ErrorCode::kIo, kLoad, source.path_of(name) + ": tensor " + io::in_quotes(name),
         "got " + std::to_string(entry.shape.size()) + " dimensions, expected a matrix");
  }
  return entry.shape[1];
}

std::unique_ptr<AttentionLayer> load(const Context& context, const models::TensorSource& source,
                                     const TorchAttentionOptions& options) {
  const std::string& prefix = options.prefix;
  for (const std::string name : {"bias_k", "bias_v"}) {
    if (!source.has(prefix + name)) continue;
    fail(ErrorCode::kUnsupported, kLoad,
         source.path_of(prefix + name) + ": tensor " + io::in_quotes(prefix + name),
         "got it, expected none: Ladon has no add_bias_kv");
  }
  const bool separate = !source.has(prefix + "in_proj_weight");
  MultiHeadAttentionOptions layer{
      .num_heads = options.num_heads, .causal = options.causal, .dropout = options.dropout};
  if (separate) {
    layer.embed_dim = input_width(source, prefix + "q_proj_weight");
    layer.key_dim = input_width(source, prefix + "k_proj_weight");
    layer.value_input_dim = input_width(source, prefix + "v_proj_weight");
  } else {
    layer.embed_dim = input_width(source, prefix + "in_proj_weight");
  }
  layer.query_bias = layer.key_bias = layer.value_bias = source.has(prefix + "in_proj_bias");
  layer.out_bias = source.has(prefix + "out_proj.bias");
  const MultiHeadAttentionOptions complete = multi_head::complete_options(layer);
  return models::load_layer(context, source, {.operation = kLoad, .prefix = prefix},
                            models::torch_tensors(complete, separate), complete, options.dtype);
}

}  // namespace

std::unique_ptr<AttentionLayer> load_torch_attention(const Context& context,
                                                     const std::filesystem::path& path,
                                                     const TorchAttentionOptions& options) {
  return as_part_of(kLoad, [&] {
    std::error_code ignored;
    if (std::filesystem::is_directory(path, ignored)) {
      const ShardedSafetensors folder = ShardedSafetensors::open(path);
      return load(context, models::TensorSource(folder), options);
    }
    const SafetensorsFile file = SafetensorsFile::open(path);
    return load(context, models::TensorSource(file), options);
  });
}

std::vector<NamedTensor> torch_attention_tensors(const AttentionLayer& layer,
                                                 std::string_view prefix) {
  const MultiHeadAttention& multi_head = models::as_multi_head(kSave, layer);
  const MultiHeadAttentionOptions& options = multi_head.options();
  const auto refuse = [](const std::string& what) { fail(kSave, "layer", what); };
  if (options.num_kv_heads != options.num_heads) {
    refuse("got " + std::to_string(options.num_kv_heads) + " KV heads, expected " +
           std::to_string(options.num_heads));
  }
  if (options.num_heads * options.head_dim != options.embed_dim) {
    refuse("got a head_dim of " + std::to_string(options.head_dim) +
           ", expected embed_dim / num_heads");
  }
  if (options.query_bias != options.key_bias || options.query_bias != options.value_bias ||
      options.query_bias != options.out_bias) {
    refuse("got some of the biases, expected all of them or none");
  }
  if (options.qk_norm || options.sinks) {
    refuse("got a q/k norm or sinks, expected none");
  }
  const bool separate =
      options.key_dim != options.embed_dim || options.value_input_dim != options.embed_dim;
  return models::save_layer(multi_head, prefix, models::torch_tensors(options, separate));
}

}  // namespace ladon
