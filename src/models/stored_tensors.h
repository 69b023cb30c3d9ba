// The weights of a layer as a file keeps them: which tensors, of which shapes, and where in them
// each parameter is. Loading and saving go by the same list.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ladon/checkpoint.h"
#include "ladon/latent_attention.h"
#include "ladon/multi_head_attention.h"
#include "ladon/safetensors.h"
#include "models/families.h"

namespace ladon::models {

/// One tensor of a file, with the parameter it holds, or the three that are fused in it.
struct StoredTensor {
  std::string name;
  std::vector<std::string> parameters;
  Dims shape{};  // in the file
  QkvStorage storage = QkvStorage::kSeparate;
  bool transposed = false;
};

/// All of them for a layer of the family, names without the layer's prefix. The options must be
/// complete, here and below.
std::vector<StoredTensor> stored_tensors(const Family& family,
                                         const MultiHeadAttentionOptions& options);
/// The same for torch.nn.MultiheadAttention.
std::vector<StoredTensor> torch_tensors(const MultiHeadAttentionOptions& options, bool separate);

/// The same for latent layers, whose parameters have the published names.
std::vector<StoredTensor> stored_tensors(const LatentAttentionOptions& options);

/// Where the tensors come from: a file or a folder of them.
class TensorSource {
 public:
  explicit TensorSource(const SafetensorsFile& file) : file_(&file) {}
  explicit TensorSource(const ShardedSafetensors& folder) : folder_(&folder) {}

  std::vector<std::string> names() const;
  bool has(std::string_view name) const;
  const SafetensorsEntry& entry(std::string_view name) const;
  Tensor load(std::string_view name) const;
  /// A view into the file's mapping, which reads what is touched alone. As SafetensorsFile's.
  ConstTensorView tensor(std::string_view name) const;
  /// The file or folder, and the file that holds a tensor, as messages show them.
  std::string path() const;
  std::string path_of(std::string_view name) const;

 private:
  const SafetensorsFile* file_ = nullptr;
  const ShardedSafetensors* folder_ = nullptr;
};

/// How the tensors of one layer are called in a source.
struct LayerNames {
  std::string_view operation;  // begins the messages
  std::string prefix;
  std::string_view other_tensors{};  // under the prefix, and of no concern
};

/// A layer as a source keeps it, or is to keep it.
struct StoredLayer {
  LayerNames names;
  std::vector<StoredTensor> tensors;
  LayerOptions options;  // complete, but for the dtype
};
/// That of a model's description. Throws Error, as load_attention() does.
StoredLayer stored_layer(const TensorSource& source, const ModelDescription& model,
                         std::int64_t layer_index);
/// That of a layer which is to be written. Throws Error, as attention_tensors() does.
StoredLayer stored_layer(const LayerOptions& options, std::string_view family,
                         std::int64_t layer_index);

/// Checks the names, shapes and dtypes of all tensors, and returns the dtype of the layer.
DType check_layer(const TensorSource& source, const LayerNames& names,
                  const std::vector<StoredTensor>& tensors, std::optional<DType> dtype);

/// The places of the parameters in a stored tensor, in their order. A place has the shape that the
/// dense parameter is to be seen in.
template <class View>
std::vector<View> places_of(const StoredTensor& tensor, const LayerOptions& options,
                            const View& stored);

/// A layer from its tensors, where the Context is; options as describe_model() gives them.
std::unique_ptr<AttentionLayer> load_layer(const Context& context, const TensorSource& source,
                                           const LayerNames& names,
                                           const std::vector<StoredTensor>& tensors,
                                           MultiHeadAttentionOptions options,
                                           std::optional<DType> dtype);
std::unique_ptr<AttentionLayer> load_layer(const Context& context, const TensorSource& source,
                                           const LayerNames& names,
                                           const std::vector<StoredTensor>& tensors,
                                           LatentAttentionOptions options,
                                           std::optional<DType> dtype);

/// The other way.
std::vector<NamedTensor> save_layer(const MultiHeadAttention& layer, std::string_view prefix,
                                    const std::vector<StoredTensor>& tensors);
std::vector<NamedTensor> save_layer(const LatentAttention& layer, std::string_view prefix,
                                    const std::vector<StoredTensor>& tensors);

/// The layer as what it is; throws where it is of another kind.
const MultiHeadAttention& as_multi_head(std::string_view operation, const AttentionLayer& layer);
const LatentAttention& as_latent(std::string_view operation, const AttentionLayer& layer);

}  // namespace ladon::models
