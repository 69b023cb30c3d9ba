#include "models/stored_tensors.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/fail.h"
#include "core/host_copy.h"
#include "io/file.h"
#include "layers/latent_steps.h"
#include "layers/multi_head.h"

namespace ladon::models {
namespace {

/// The parameter's shape, as MultiHeadAttention makes it.
Dims parameter_shape(std::string_view parameter, const MultiHeadAttentionOptions& options) {
  const std::int64_t query_width = options.num_heads * options.head_dim;
  const std::int64_t kv_width = options.num_kv_heads * options.head_dim;
  struct Projection {
    std::string_view name;
    std::int64_t out, in;
  };
  const std::array<Projection, 4> projections = {{{"q_proj.", query_width, options.embed_dim},
                                                  {"k_proj.", kv_width, options.key_dim},
                                                  {"v_proj.", kv_width, options.value_input_dim},
                                                  {"out_proj.", options.embed_dim, query_width}}};
  for (const auto& [name, out, in] : projections) {
    if (!parameter.starts_with(name)) continue;
    return parameter.ends_with(".weight") ? Dims{out, in} : Dims{out};
  }
  if (parameter == "sinks") return {options.num_heads};
  return multi_head::norm_shape(
      options, parameter == "q_norm.weight" ? options.num_heads : options.num_kv_heads);
}

template <class View>
std::vector<View> multi_head_places(const StoredTensor& tensor,
                                    const MultiHeadAttentionOptions& options, View stored) {
  if (tensor.transposed && stored.rank() == 2) stored = stored.transpose(0, 1);
  if (tensor.parameters.size() == 1) return {stored};
  const std::int64_t query_width = options.num_heads * options.head_dim;
  const std::int64_t kv_width = options.num_kv_heads * options.head_dim;
  if (tensor.storage == QkvStorage::kConcatenated) {
    return {stored.slice(0, 0, query_width), stored.slice(0, query_width, query_width + kv_width),
            stored.slice(0, query_width + kv_width, query_width + 2 * kv_width)};
  }
  const std::int64_t group = options.num_heads / options.num_kv_heads;
  const bool is_weight = stored.rank() == 2;
  const View heads = stored.reshape(
      is_weight ? Dims{options.num_kv_heads, group + 2, options.head_dim, stored.size(1)}
                : Dims{options.num_kv_heads, group + 2, options.head_dim});
  return {heads.slice(1, 0, group), heads.slice(1, group, group + 1),
          heads.slice(1, group + 1, group + 2)};
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return text + "]";
}

bool same_shape(const std::vector<std::int64_t>& shape, const Dims& wanted) {
  return std::equal(shape.begin(), shape.end(), wanted.begin(), wanted.end());
}

[[noreturn]] void refuse(const LayerNames& names, const std::string& path, std::string_view tensor,
                         std::string_view what, ErrorCode code = ErrorCode::kIo) {
  fail(code, names.operation, path + ": tensor " + io::in_quotes(tensor), what);
}

/// F8_E4M3 and its like, which are worth nothing without their scales.
bool is_quantised(const SafetensorsEntry& entry) { return entry.dtype_name.starts_with("F8_"); }

/// Refuses what stands under the layer's prefix and is not known.
void check_no_other(const TensorSource& source, const LayerNames& names,
                    const std::vector<StoredTensor>& tensors) {
  for (const std::string& name : source.names()) {
    if (!name.starts_with(names.prefix)) continue;
    const std::string_view rest = std::string_view(name).substr(names.prefix.size());
    if (has_word(names.other_tensors, rest)) continue;
    const bool known = std::any_of(tensors.begin(), tensors.end(),
                                   [&](const StoredTensor& each) { return each.name == rest; });
    if (!known) {
      refuse(names, source.path_of(name), name,
             "got a tensor that is not expected, expected only the attention's own under " +
                 io::in_quotes(names.prefix));
    }
  }
}

/// Checks every tensor and returns the dtype of the layer.
DType check_tensors(const TensorSource& source, const LayerNames& names,
                    const std::vector<StoredTensor>& tensors, std::optional<DType> wanted) {
  std::optional<DType> first;
  for (const StoredTensor& tensor : tensors) {
    const std::string name = names.prefix + tensor.name;
    if (!source.has(name)) {
      refuse(names, source.path(), name,
             "got none, expected one of shape " + tensor.shape.to_string());
    }
    const SafetensorsEntry& entry = source.entry(name);
    if (!same_shape(entry.shape, tensor.shape)) {
      refuse(names, source.path_of(name), name,
             "got " + shape_text(entry.shape) + ", expected " + tensor.shape.to_string());
    }
    if (!entry.dtype || !is_float(*entry.dtype)) {
      refuse(names, source.path_of(name), name,
             "got dtype " + std::string(entry.dtype_name) + ", expected F64, F32, F16 or BF16" +
                 (is_quantised(entry) ? ": quantised weights must be converted first" : ""));
    }
    if (!first) first = entry.dtype;
    if (!wanted && *first != *entry.dtype) {
      refuse(names, source.path_of(name), name,
             "got dtype " + std::string(entry.dtype_name) + ", expected that of " +
                 io::in_quotes(names.prefix + tensors.front().name) + ", which is " +
                 name_of(*first) + " (or ask for a dtype)");
    }
  }
  return wanted.value_or(first.value_or(DType::kF32));
}

/// Gives every tensor its shape.
std::vector<StoredTensor> with_shapes(std::vector<StoredTensor> tensors,
                                      const MultiHeadAttentionOptions& options) {
  for (StoredTensor& tensor : tensors) {
    tensor.shape = parameter_shape(tensor.parameters.front(), options);
    for (std::size_t i = 1; i < tensor.parameters.size(); ++i) {
      tensor.shape[0] += parameter_shape(tensor.parameters[i], options)[0];
    }
    if (tensor.transposed && tensor.shape.rank() == 2) {
      std::swap(tensor.shape[0], tensor.shape[1]);
    }
  }
  return tensors;
}

template <class Layer>
const Layer& as_kind(std::string_view operation, const AttentionLayer& layer,
                     std::string_view kind) {
  const auto* const same = dynamic_cast<const Layer*>(&layer);
  if (same == nullptr) {
    fail(operation, "layer",
         "got a " + std::string(layer.type_name()) + ", expected a " + std::string(kind));
  }
  return *same;
}

/// A layer whose weights are to be set, on the Context's device.
template <class Layer, class Options>
std::unique_ptr<Layer> make_empty(const Context& context, const Options& options) {
  auto layer = std::make_unique<Layer>(Layer::zeros(options));
  if (!context.device().is_cpu()) layer->to(context);
  return layer;
}

/// Takes the tensor as it is where it can, so that there is no second one on the host.
void set_value(const Context& context, Parameter& parameter, Tensor stored) {
  if (context.device().is_cpu() && stored.dtype() == parameter.value.dtype()) {
    parameter.value = std::move(stored);
  } else {
    copy(context, stored, parameter.value);
  }
}

}  // namespace

template <class View>
std::vector<View> places_of(const StoredTensor& tensor, const LayerOptions& options,
                            const View& stored) {
  const auto* const multi_head = std::get_if<MultiHeadAttentionOptions>(&options);
  if (multi_head == nullptr) return {stored};
  return multi_head_places(tensor, *multi_head, stored);
}
template std::vector<TensorView> places_of(const StoredTensor&, const LayerOptions&,
                                           const TensorView&);
template std::vector<ConstTensorView> places_of(const StoredTensor&, const LayerOptions&,
                                                const ConstTensorView&);

DType check_layer(const TensorSource& source, const LayerNames& names,
                  const std::vector<StoredTensor>& tensors, std::optional<DType> dtype) {
  if (dtype && !is_float(*dtype)) {
    fail(names.operation, "dtype",
         std::string("got ") + name_of(*dtype) + ", expected f64, f32, f16 or bf16");
  }
  // Tensors of the right name and the wrong dtype first: the scales of quantised weights are
  // not expected either, but the dtype says why.
  const DType found = check_tensors(source, names, tensors, dtype);
  check_no_other(source, names, tensors);
  return found;
}

std::vector<StoredTensor> stored_tensors(const Family& family,
                                         const MultiHeadAttentionOptions& options) {
  std::vector<StoredTensor> tensors;
  const auto add = [&](std::string_view name, std::string_view parameter) {
    tensors.push_back({.name = std::string(name),
                       .parameters = {std::string(parameter)},
                       .transposed = family.transposed});
  };
  const auto add_projection = [&](std::string_view name, std::string_view parameter, bool bias) {
    add(std::string(name) + ".weight", std::string(parameter) + ".weight");
    if (bias) add(std::string(name) + ".bias", std::string(parameter) + ".bias");
  };
  if (family.qkv == QkvStorage::kSeparate) {
    add_projection(family.query, "q_proj", options.query_bias);
    add_projection(family.key, "k_proj", options.key_bias);
    add_projection(family.value, "v_proj", options.value_bias);
  } else {
    for (const std::string kind : {".weight", ".bias"}) {
      if (kind == ".bias" && !options.query_bias) continue;
      tensors.push_back({.name = std::string(family.fused) + kind,
                         .parameters = {"q_proj" + kind, "k_proj" + kind, "v_proj" + kind},
                         .storage = family.qkv,
                         .transposed = family.transposed});
    }
  }
  add_projection(family.out, "out_proj", options.out_bias);
  if (options.qk_norm) {
    add("q_norm.weight", "q_norm.weight");
    add("k_norm.weight", "k_norm.weight");
  }
  if (options.sinks) add("sinks", "sinks");
  return with_shapes(std::move(tensors), options);
}

std::vector<StoredTensor> torch_tensors(const MultiHeadAttentionOptions& options, bool separate) {
  const auto fused = [](const std::string& name, const std::string& kind) {
    return StoredTensor{.name = name,
                        .parameters = {"q_proj" + kind, "k_proj" + kind, "v_proj" + kind},
                        .storage = QkvStorage::kConcatenated};
  };
  std::vector<StoredTensor> tensors;
  if (separate) {
    for (const std::string name : {"q_proj", "k_proj", "v_proj"}) {
      tensors.push_back({.name = name + "_weight", .parameters = {name + ".weight"}});
    }
  } else {
    tensors.push_back(fused("in_proj_weight", ".weight"));
  }
  if (options.query_bias) tensors.push_back(fused("in_proj_bias", ".bias"));
  tensors.push_back({.name = "out_proj.weight", .parameters = {"out_proj.weight"}});
  if (options.out_bias)
    tensors.push_back({.name = "out_proj.bias", .parameters = {"out_proj.bias"}});
  return with_shapes(std::move(tensors), options);
}

std::unique_ptr<AttentionLayer> load_layer(const Context& context, const TensorSource& source,
                                           const LayerNames& names,
                                           const std::vector<StoredTensor>& tensors,
                                           MultiHeadAttentionOptions options,
                                           std::optional<DType> dtype) {
  options.dtype = check_layer(source, names, tensors, dtype);
  auto layer = make_empty<MultiHeadAttention>(context, options);
  for (const StoredTensor& tensor : tensors) {
    Tensor stored = source.load(names.prefix + tensor.name);
    if (tensor.parameters.size() == 1 && !tensor.transposed) {
      set_value(context, layer->parameter(tensor.parameters.front()), std::move(stored));
      continue;
    }
    const auto places = multi_head_places(tensor, options, ConstTensorView(stored));
    for (std::size_t i = 0; i < places.size(); ++i) {
      Tensor& value = layer->parameter(tensor.parameters[i]).value;
      copy(context, places[i], value.view().reshape(places[i].shape()));
    }
  }
  layer->eval();
  return layer;
}

std::vector<NamedTensor> save_layer(const MultiHeadAttention& layer, std::string_view prefix,
                                    const std::vector<StoredTensor>& tensors) {
  std::vector<NamedTensor> result;
  for (const StoredTensor& tensor : tensors) {
    NamedTensor& named = result.emplace_back();
    named.name = std::string(prefix) + tensor.name;
    named.value = Tensor::uninitialized(layer.dtype(), tensor.shape);
    const auto places = multi_head_places(tensor, layer.options(), named.value.view());
    for (std::size_t i = 0; i < places.size(); ++i) {
      const Tensor value = layer.parameter(tensor.parameters[i]).value.to_host();
      copy_on_host(nullptr, value.view().reshape(places[i].shape()), places[i]);
    }
  }
  return result;
}

std::vector<StoredTensor> stored_tensors(const LatentAttentionOptions& options) {
  std::vector<StoredTensor> tensors;
  for (auto& [name, shape] : latent::plan_parameters(options)) {
    tensors.push_back({.name = name, .parameters = {name}, .shape = shape});
  }
  return tensors;
}

std::unique_ptr<AttentionLayer> load_layer(const Context& context, const TensorSource& source,
                                           const LayerNames& names,
                                           const std::vector<StoredTensor>& tensors,
                                           LatentAttentionOptions options,
                                           std::optional<DType> dtype) {
  options.dtype = check_layer(source, names, tensors, dtype);
  auto layer = make_empty<LatentAttention>(context, options);
  for (const StoredTensor& tensor : tensors) {
    set_value(context, layer->parameter(tensor.name), source.load(names.prefix + tensor.name));
  }
  layer->eval();
  return layer;
}

std::vector<NamedTensor> save_layer(const LatentAttention& layer, std::string_view prefix,
                                    const std::vector<StoredTensor>& tensors) {
  std::vector<NamedTensor> result;
  result.reserve(tensors.size());
  for (const StoredTensor& tensor : tensors) {
    result.push_back({.name = std::string(prefix) + tensor.name,
                      .value = layer.parameter(tensor.name).value.to_host()});
  }
  return result;
}

const MultiHeadAttention& as_multi_head(std::string_view operation, const AttentionLayer& layer) {
  return as_kind<MultiHeadAttention>(operation, layer, "MultiHeadAttention");
}

const LatentAttention& as_latent(std::string_view operation, const AttentionLayer& layer) {
  return as_kind<LatentAttention>(operation, layer, "LatentAttention");
}

}  // namespace ladon::models
