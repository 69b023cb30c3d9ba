// Attention layers out of published models' folders, and back under the same names.
//
//   const auto layer = load_attention(context, "models/llama-3.1-8b", /*layer_index=*/0);
//
// reads config.json (Hugging Face's) and the layer's own tensors, and nothing else of the weights.
// What a config says is honoured or refused: a family that Ladon does not know, a field that would
// change attention in a way it does not do, and a field that it does not know and whose name could
// concern attention are all an Error (kUnsupported) that names them. A field that is null counts as
// absent. A file that cannot be trusted is an Error (kIo). In every case no layer comes back.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "ladon/attention_layer.h"
#include "ladon/export.h"
#include "ladon/latent_attention.h"
#include "ladon/multi_head_attention.h"
#include "ladon/safetensors.h"

namespace ladon {

/// The families that are read, as config.json's model_type spells them: "bert", "bloom",
/// "deepseek_v2", "deepseek_v3", "falcon", "gemma2", "gpt2", "gpt_bigcode", "gpt_oss", "llama",
/// "mistral", "qwen2", "qwen3".
LADON_API std::vector<std::string> model_families();

/// What a layer is made of: its kind is the layer's. Other kinds of layers may join.
using LayerOptions = std::variant<MultiHeadAttentionOptions, LatentAttentionOptions>;

/// A model's attention as its config describes it, whatever the family.
struct ModelDescription {
  std::string family;
  std::int64_t num_layers = 0;
  std::int64_t embed_dim = 0;
  std::int64_t num_heads = 0;
  /// As the layers' num_kv_heads() and head_dim() give them. Latent layers: num_heads, and the
  /// width of a query; what their cache holds follows from kv_rank and rope_dim of their options.
  std::int64_t num_kv_heads = 0;
  std::int64_t head_dim = 0;
  /// What the config calls its weights' dtype. The files may differ, and then they are right.
  std::optional<DType> dtype{};
  /// One for each layer, complete but for the dtype: window, rope and scale may differ.
  std::vector<LayerOptions> layers{};
};

struct DescribeOptions {
  /// Fields of the config that the caller knows to make no difference to attention, and that would
  /// be refused otherwise: "my_attention_note", "rope_scaling.origin".
  std::vector<std::string> ignored_fields{};
  /// Tokens of the longest sequence that will come: models whose rope scaling is dynamic or
  /// longrope choose their frequencies by it, and refuse positions past it. 0: the context that
  /// they were trained on before scaling.
  std::int64_t rope_context = 0;
};

/// Reads `folder`/config.json, or `folder` itself where it is a file of any name, in the style of
/// old files (rope_scaling, torch_dtype) or of new ones (rope_parameters, dtype).
LADON_API ModelDescription describe_model(const std::filesystem::path& folder,
                                          const DescribeOptions& options = {});

struct LoadOptions {
  /// Of the layer. Empty: that of its tensors, which must then share one.
  std::optional<DType> dtype{};
  /// Both as in DescribeOptions.
  std::vector<std::string> ignored_fields{};
  std::int64_t rope_context = 0;
};

/// The attention layer with this number, from 0, in eval mode, on the Context's device: tensors go
/// there one by one. Reads that layer's tensors alone; each is checked before the first is read. A
/// missing, unexpected, misshapen or wrongly typed tensor is an Error (kIo) that names it and its
/// file.
LADON_API std::unique_ptr<AttentionLayer> load_attention(const Context& context,
                                                         const std::filesystem::path& folder,
                                                         std::int64_t layer_index,
                                                         const LoadOptions& options = {});

/// The same for those who want several layers of one model, or hold its tensors open already.
/// Only `dtype` of the options is read.
LADON_API std::unique_ptr<AttentionLayer> load_attention(const Context& context,
                                                         const ShardedSafetensors& weights,
                                                         const ModelDescription& model,
                                                         std::int64_t layer_index,
                                                         const LoadOptions& options = {});

/// A tensor that is to be written under this name.
struct NamedTensor {
  std::string name;
  Tensor value;
};

/// What write_safetensors() takes. The views live as long as the tensors.
LADON_API std::vector<SafetensorsItem> items_of(const std::vector<NamedTensor>& tensors);

/// The layer's weights as that family stores them, fused and transposed again where it does so, in
/// the layer's dtype. Throws Error where the family cannot hold the layer: a bias or a norm that
/// it has no name for, KV heads that it does not know of.
LADON_API std::vector<NamedTensor> attention_tensors(const AttentionLayer& layer,
                                                     std::string_view family,
                                                     std::int64_t layer_index);

/// PyTorch's torch.nn.MultiheadAttention has no config: what its tensors do not say is said here.
struct TorchAttentionOptions {
  std::int64_t num_heads = 0;
  /// What the names of its tensors begin with: "encoder.layers.0.self_attn.". All tensors whose
  /// names begin so must belong to the module.
  std::string prefix{};
  bool causal = false;
  double dropout = 0;
  /// As in LoadOptions.
  std::optional<DType> dtype{};
};

/// From a safetensors file or a folder of them: in_proj_weight, or q_proj_weight, k_proj_weight and
/// v_proj_weight for inputs of several widths; in_proj_bias; out_proj. In eval mode.
LADON_API std::unique_ptr<AttentionLayer> load_torch_attention(
    const Context& context, const std::filesystem::path& path,
    const TorchAttentionOptions& options);

/// The layer's weights under the names that torch.nn.MultiheadAttention would give them.
LADON_API std::vector<NamedTensor> torch_attention_tensors(const AttentionLayer& layer,
                                                           std::string_view prefix = {});

}  // namespace ladon
