// Layers from checkpoints and back, and safetensors files.
#include <nanobind/nanobind.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/string.h>

#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "attention_call.h"
#include "ladon/checkpoint.h"
#include "ladon/safetensors.h"
#include "module.h"
#include "objects.h"
#include "options.h"

namespace ladon::python {
namespace {

using Path = std::filesystem::path;

nb::list py_model_families() {
  nb::list result;
  for (const std::string& family : model_families()) result.append(family);
  return result;
}

nb::dict py_describe_model(const Path& folder, const nb::kwargs& kwargs) {
  Keywords keywords("describe_model", kwargs);
  DescribeOptions options;
  keywords.read("ignored_fields", options.ignored_fields);
  keywords.read("rope_context", options.rope_context);
  keywords.finish();
  const ModelDescription model = without_gil([&] { return describe_model(folder, options); });
  nb::dict dict;
  dict["family"] = model.family;
  dict["num_layers"] = model.num_layers;
  dict["embed_dim"] = model.embed_dim;
  dict["num_heads"] = model.num_heads;
  dict["num_kv_heads"] = model.num_kv_heads;
  dict["head_dim"] = model.head_dim;
  dict["dtype"] = model.dtype ? nb::object(nb::str(name_of(*model.dtype))) : nb::none();
  nb::list layers;
  for (const LayerOptions& layer : model.layers) {
    layers.append(std::visit([](const auto& kind) { return options_dict(kind); }, layer));
  }
  dict["layers"] = layers;
  return dict;
}

nb::object py_load_attention(const Path& folder, nb::handle layer_index, const nb::kwargs& kwargs) {
  Keywords keywords("load_attention", kwargs);
  const std::int64_t index = to_integer(layer_index, keywords.where("layer_index"));
  const LoadOptions options = to_load_options(keywords);
  DeviceId device;
  keywords.read("device", device);
  keywords.finish();
  const BoundContext& context = context_of(device);
  return wrap_layer(without_gil([&] { return load_attention(context, folder, index, options); }));
}

nb::object py_load_torch_attention(const Path& path, const nb::kwargs& kwargs) {
  Keywords keywords("load_torch_attention", kwargs);
  TorchAttentionOptions options;
  keywords.read("num_heads", options.num_heads);
  keywords.read("prefix", options.prefix);
  keywords.read("causal", options.causal);
  keywords.read("dropout", options.dropout);
  keywords.read("dtype", options.dtype);
  DeviceId device;
  keywords.read("device", device);
  keywords.finish();
  const BoundContext& context = context_of(device);
  return wrap_layer(without_gil([&] { return load_torch_attention(context, path, options); }));
}

nb::dict tensors_dict(std::vector<NamedTensor>&& tensors) {
  nb::dict dict;
  for (NamedTensor& tensor : tensors) {
    dict[tensor.name.c_str()] =
        to_array(std::move(tensor.value), Framework::kNumpy, default_context());
  }
  return dict;
}

nb::dict py_attention_tensors(const Layer& layer, nb::handle family, nb::handle layer_index) {
  const std::string name = to_text(family, {"attention_tensors", "family"});
  const std::int64_t index = to_integer(layer_index, {"attention_tensors", "layer_index"});
  return tensors_dict(reading(layer, [&] { return attention_tensors(*layer.layer, name, index); }));
}

nb::dict py_torch_attention_tensors(const Layer& layer, nb::handle prefix) {
  const std::string text = to_text(prefix, {"torch_attention_tensors", "prefix"});
  return tensors_dict(reading(layer, [&] { return torch_attention_tensors(*layer.layer, text); }));
}

nb::dict py_load_safetensors(const Path& path, nb::handle names_object) {
  nb::dict wanted;
  wanted["names"] = names_object;
  Keywords keywords("load_safetensors", wanted);
  std::vector<std::string> names;
  keywords.read("names", names);
  std::vector<NamedTensor> tensors = without_gil([&] {
    const SafetensorsFile file = SafetensorsFile::open(path);
    std::vector<NamedTensor> loaded;
    for (const std::string& name : names_object.is_none() ? file.names() : names) {
      loaded.push_back({name, file.load(name)});
    }
    return loaded;
  });
  return tensors_dict(std::move(tensors));
}

void py_save_safetensors(const Path& path, nb::handle tensors_object, nb::handle metadata_object) {
  const Where where{"save_safetensors", "tensors"};
  if (!nb::isinstance<nb::dict>(tensors_object)) throw_type_error(where, tensors_object, "a dict");
  std::vector<Array> arrays;
  std::vector<SafetensorsItem> items;
  for (const auto& [name, array] : nb::borrow<nb::dict>(tensors_object)) {
    arrays.push_back(required(array, where));
    items.push_back({to_text(name, where), arrays.back().view()});
  }
  std::map<std::string, std::string> metadata;
  if (!metadata_object.is_none()) {
    const Where there{"save_safetensors", "metadata"};
    if (!nb::isinstance<nb::dict>(metadata_object)) {
      throw_type_error(there, metadata_object, "a dict of str");
    }
    for (const auto& [key, text] : nb::borrow<nb::dict>(metadata_object)) {
      metadata[to_text(key, there)] = to_text(text, there);
    }
  }
  without_gil([&] { write_safetensors(path, items, metadata); });
}

}  // namespace

void bind_models(nb::module_& module) {
  module.def("model_families", &py_model_families, nb::sig("def model_families() -> list[str]"),
             "The families that load_attention() reads, as config.json's model_type spells them.");
  module.def("describe_model", &py_describe_model, nb::arg("folder"), nb::arg("kwargs"),
             nb::sig("def describe_model(folder: str | os.PathLike[str], *, ignored_fields: "
                     "Sequence[str] = (), rope_context: int = 0) -> dict[str, Any]"),
             R"(A model's attention, as its config.json describes it.

Parameters
----------
folder : path
    Of the model, or of a config with any name.
ignored_fields : sequence of str
    Fields of the config that are not understood and may be ignored.
rope_context : int
    The longest sequence that will come, by which models with dynamic or longrope scaling choose their frequencies.

Returns
-------
dict
    Of the model; `layers` has the options of each layer.)");
  module.def("load_attention", &py_load_attention, nb::arg("folder"), nb::arg("layer_index"),
             nb::arg("kwargs"),
             nb::sig("def load_attention(folder: str | os.PathLike[str], layer_index: int, *, "
                     "dtype: DTypeLike | None = None, ignored_fields: Sequence[str] = (), "
                     "rope_context: int = 0, device: DeviceLike = 'cpu') -> AttentionLayer"),
             R"(An attention layer of a published model, in eval mode.

Parameters
----------
folder : path
    With config.json and safetensors.
layer_index : int
    From 0.
dtype : optional
    Of the layer; that of the weights in the file unless given.
ignored_fields : sequence of str
    Fields of the config that are not understood and may be ignored.
rope_context : int
    The longest sequence that will come, by which models with dynamic or longrope scaling choose their frequencies.
device : optional
    "cpu", "cuda" or "cuda:1".

Returns
-------
AttentionLayer
    A MultiHeadAttention or a LatentAttention.)");
  module.def("load_torch_attention", &py_load_torch_attention, nb::arg("path"), nb::arg("kwargs"),
             nb::sig("def load_torch_attention(path: str | os.PathLike[str], *, num_heads: int, "
                     "prefix: str = '', causal: bool = False, dropout: float = 0.0, dtype: "
                     "DTypeLike | None = None, device: DeviceLike = 'cpu') -> AttentionLayer"),
             R"(A torch.nn.MultiheadAttention from a safetensors file, in eval mode.

Parameters
----------
path : path
    Of the file.
num_heads : int
    Which the file does not tell.
prefix : str
    What the tensors' names begin with, such as "encoder.layers.0.self_attn.".
causal : bool
    No token sees a later one.
dropout : float
    Probability with which a weight is dropped in training.
dtype : optional
    Of the layer; that of the weights in the file unless given.
device : optional
    "cpu", "cuda" or "cuda:1".

Returns
-------
MultiHeadAttention)");
  module.def("attention_tensors", &py_attention_tensors, nb::arg("layer"), nb::arg("family"),
             nb::arg("layer_index"),
             nb::sig("def attention_tensors(layer: AttentionLayer, family: str, layer_index: int) "
                     "-> dict[str, Any]"),
             R"(The layer's weights as a family of published models stores them.

Parameters
----------
layer : AttentionLayer
family : str
    One of model_families().
layer_index : int
    Of the layer in the model: it is part of the tensors' names.

Returns
-------
dict of str to array)");
  module.def("torch_attention_tensors", &py_torch_attention_tensors, nb::arg("layer"),
             nb::arg("prefix") = "",
             nb::sig("def torch_attention_tensors(layer: AttentionLayer, prefix: str = '') -> "
                     "dict[str, Any]"),
             R"(The layer's weights under the names of torch.nn.MultiheadAttention.

Parameters
----------
layer : MultiHeadAttention
prefix : str
    What the names begin with.

Returns
-------
dict of str to array)");
  module.def("load_safetensors", &py_load_safetensors, nb::arg("path"),
             nb::arg("names").none() = nb::none(),
             nb::sig("def load_safetensors(path: str | os.PathLike[str], names: Sequence[str] | "
                     "None = None) -> dict[str, Any]"),
             R"(Reads tensors of a safetensors file.

Parameters
----------
path : path
names : sequence of str, optional
    The tensors that are read; all of them unless given.

Returns
-------
dict of str to array)");
  module.def(
      "save_safetensors", &py_save_safetensors, nb::arg("path"), nb::arg("tensors").none(),
      nb::arg("metadata").none() = nb::none(),
      nb::sig("def save_safetensors(path: str | os.PathLike[str], tensors: dict[str, Array], "
              "metadata: dict[str, str] | None = None) -> None"),
      R"(Writes a safetensors file, completely or not at all.

Parameters
----------
path : path
    Symbolic links are followed; pipes and devices are written to.
tensors : dict of str to array
metadata : dict of str to str, optional)");
}

}  // namespace ladon::python
