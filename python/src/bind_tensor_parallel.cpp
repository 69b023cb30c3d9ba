// Layers whose heads ranks share, and their files.
#include <nanobind/nanobind.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/string.h>

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "attention_call.h"
#include "communicator_objects.h"
#include "ladon/parallel_checkpoint.h"
#include "ladon/tensor_parallel.h"
#include "layer_call.h"
#include "module.h"
#include "objects.h"
#include "optimiser_objects.h"
#include "options.h"
#include "spread_objects.h"

namespace ladon::python {
namespace {

using Path = std::filesystem::path;

struct ParallelLayer : Layer {
  using Layer::Layer;
};
struct ParallelMultiHeadLayer : ParallelLayer {
  using ParallelLayer::ParallelLayer;
};
struct ParallelLatentLayer : ParallelLayer {
  using ParallelLayer::ParallelLayer;
};

TensorParallelLayer& shared(const ParallelLayer& self) {
  return dynamic_cast<TensorParallelLayer&>(*self.layer);
}

/// Makes a layer of the keywords that are left.
template <class Made, class Held, class Options>
void make(Held* self, nb::handle communicator, Keywords& keywords, const Options& options) {
  auto ranks = ranks_in(communicator, keywords.where("communicator"));
  DeviceId device;
  keywords.read("device", device);
  keywords.finish();
  const BoundContext& context = context_of(device);
  auto layer = without_gil([&] {
    auto made = std::make_unique<Made>(*ranks, options);
    if (!device.is_cpu()) made->to(context);
    return made;
  });
  new (self) Held(std::move(layer), std::move(ranks));
}

void make_multi_head(ParallelMultiHeadLayer* self, nb::handle communicator,
                     const nb::kwargs& kwargs) {
  Keywords keywords("TensorParallelAttention", kwargs);
  make<TensorParallelAttention>(self, communicator, keywords, to_multi_head_options(keywords));
}

void make_latent(ParallelLatentLayer* self, nb::handle communicator, const nb::kwargs& kwargs) {
  Keywords keywords("TensorParallelLatentAttention", kwargs);
  make<TensorParallelLatentAttention>(self, communicator, keywords, to_latent_options(keywords));
}

/// A layer's forward(), and the same over a SpreadKvCache.
nb::object forward_latent(nb::handle self_object, nb::handle x_object, nb::handle key,
                          nb::handle value, const nb::kwargs& kwargs) {
  SpreadCache* cache = nullptr;
  if (!kwargs.contains("cache") || !nb::try_cast(kwargs["cache"], cache, /*convert=*/false) ||
      cache == nullptr) {
    return nb::type<Layer>().attr("forward")(self_object, x_object, key, value, **kwargs);
  }
  const auto& self = nb::cast<const ParallelLatentLayer&>(self_object);
  Keywords keywords("forward", kwargs);
  keywords.take("cache");
  const Array x = required(x_object, keywords.where("x"));
  LayerArguments arguments;
  arguments.read(keywords);
  SpreadAttentionOptions spread;
  Array out;
  keywords.read("reproducible", spread.reproducible);
  keywords.read_output("out", out);
  const BoundContext& context = keywords.context(x.device());
  keywords.finish();
  arguments.refuse(keywords, true);
  if (!key.is_none() || !value.is_none()) {
    throw_value_error(keywords.where(key.is_none() ? "value" : "key"),
                      "got it together with a cache, expected it left out");
  }
  const auto& layer = dynamic_cast<const TensorParallelLatentAttention&>(*self.layer);
  Tensor memory;
  without_gil([&] {
    const std::shared_lock layer_lock(self.mutex);
    const std::unique_lock cache_lock(cache->mutex);
    const CachedCall call = arguments.cached_call();
    if (out.absent()) {
      memory = layer.forward(context, x.view(), cache->cache, call, spread);
    } else {
      layer.forward(context, x.view(), cache->cache, call, out.writable_view(), spread);
    }
  });
  return give_result(out, std::move(memory), x.framework(), context);
}

void set_whole_parameter(ParallelLayer& self, nb::handle name, nb::handle value_object) {
  const std::string text = to_text(name, {"set_whole_parameter", "name"});
  const Array value = required(value_object, {"set_whole_parameter", "value"});
  const BoundContext& context = context_of(self.layer->device());
  changing(self, [&] { shared(self).set_whole_parameter(context, text, value.view()); });
}

void set_whole_parameters(ParallelLayer& self, nb::handle whole_object) {
  const Layer& whole = object_in<Layer>(whole_object, {"set_whole_parameters", "whole"}, "a layer");
  const BoundContext& context = context_of(self.layer->device());
  without_gil([&] {
    const std::unique_lock lock(self.mutex);
    const std::shared_lock whole_lock(whole.mutex);
    shared(self).set_whole_parameters(context, *whole.layer);
  });
}

nb::object whole_parameter(const ParallelLayer& self, nb::handle name) {
  const std::string text = to_text(name, {"whole_parameter", "name"});
  const BoundContext& context = context_of(self.layer->device());
  Tensor whole = reading(self, [&] { return shared(self).whole_parameter(context, text); });
  return to_array(std::move(whole), Framework::kNumpy, default_context());
}

nb::object slice_of(const ParallelLayer& self, nb::handle name, nb::handle rank_object) {
  const std::string text = to_text(name, {"slice_of", "name"});
  const std::int64_t rank = rank_object.is_none() ? shared(self).communicator().rank()
                                                  : to_integer(rank_object, {"slice_of", "rank"});
  if (rank < 0 || rank >= shared(self).communicator().size()) {
    throw_value_error({"slice_of", "rank"}, "got " + std::to_string(rank) + ", expected one of " +
                                                std::to_string(shared(self).communicator().size()) +
                                                " ranks");
  }
  const TensorParallelLayer::Slice slice = shared(self).slice_of(text, static_cast<int>(rank));
  return nb::make_tuple(slice.first, slice.first + slice.rows);
}

double clip(ParallelLayer& self, nb::handle max_norm) {
  const double limit = to_number(max_norm, {"clip_gradients", "max_norm"});
  const BoundContext& context = context_of(self.layer->device());
  return changing(self, [&] { return shared(self).clip_gradients(context, limit); });
}

nb::object py_load(nb::handle communicator, const Path& folder, nb::handle layer_index,
                   const nb::kwargs& kwargs) {
  Keywords keywords("load_tensor_parallel_attention", kwargs);
  auto ranks = ranks_in(communicator, keywords.where("communicator"));
  const std::int64_t index = to_integer(layer_index, keywords.where("layer_index"));
  const LoadOptions options = to_load_options(keywords);
  DeviceId device;
  keywords.read("device", device);
  keywords.finish();
  const BoundContext& context = context_of(device);
  std::unique_ptr<TensorParallelLayer> layer = without_gil(
      [&] { return load_tensor_parallel_attention(context, *ranks, folder, index, options); });
  constexpr auto kTake = nb::rv_policy::take_ownership;
  if (dynamic_cast<TensorParallelLatentAttention*>(layer.get()) != nullptr) {
    return nb::cast(new ParallelLatentLayer(std::move(layer), std::move(ranks)), kTake);
  }
  return nb::cast(new ParallelMultiHeadLayer(std::move(layer), std::move(ranks)), kTake);
}

void py_write(const Path& path, nb::handle layer_object, nb::handle family_object,
              nb::handle layer_index) {
  const char* const name = "write_tensor_parallel_attention";
  const auto& layer = object_in<ParallelLayer>(layer_object, {name, "layer"},
                                               "a TensorParallelAttention or -LatentAttention");
  const std::string family = to_text(family_object, {name, "family"});
  const std::int64_t index = to_integer(layer_index, {name, "layer_index"});
  const BoundContext& context = context_of(layer.layer->device());
  reading(layer,
          [&] { write_tensor_parallel_attention(context, path, shared(layer), family, index); });
}

/// save_training() and load_training(): function(context, path, layer, AdamW).
template <class Function>
void with_training(const char* name, const Path& path, nb::handle layer_object,
                   nb::handle optimiser_object, const Function& function) {
  const Where where{name, "layer"};
  auto& layer = object_in<Layer>(layer_object, where, "a layer");
  auto& holder =
      object_in<AdamWHolder>(optimiser_object, {name, "optimiser"}, "the layer's ladon.AdamW");
  if (!holder.layers.is_only(layer)) {
    throw_value_error({name, "optimiser"}, "got one of other layers, expected this layer's own");
  }
  const BoundContext& context = context_of(layer.layer->device());
  holder.layers.changing_all([&] { function(context, path, *layer.layer, holder.optimiser); });
}

void py_save_training(const Path& path, nb::handle layer, nb::handle optimiser) {
  with_training("save_training", path, layer, optimiser, &save_training);
}

void py_load_training(const Path& path, nb::handle layer, nb::handle optimiser) {
  with_training("load_training", path, layer, optimiser, &load_training);
}

}  // namespace

void bind_tensor_parallel(nb::module_& module) {
  nb::class_<ParallelLayer, Layer>(module, "TensorParallelLayer",
                                   "A layer whose heads ranks share. Inputs and outputs are whole "
                                   "on every rank; parameters() and "
                                   "gradients() are this rank's slices.")
      .def_prop_ro(
          "communicator", [](const ParallelLayer& self) { return Ranks{self.communicator}; },
          nb::sig("def communicator(self) -> Communicator"))
      .def("set_whole_parameter", &set_whole_parameter, nb::arg("name").none(),
           nb::arg("value").none(),
           nb::sig("def set_whole_parameter(self, name: str, value: Array) -> None"),
           R"(Copies this rank's rows of a weight of the whole layer; ranks may call it at any time.

Parameters
----------
name : str
value : array
    The whole weight.)")
      .def("set_whole_parameters", &set_whole_parameters, nb::arg("whole").none(),
           nb::sig("def set_whole_parameters(self, whole: AttentionLayer) -> None"),
           "The same for all weights of a layer in one process.")
      .def("whole_parameter", &whole_parameter, nb::arg("name").none(),
           nb::sig("def whole_parameter(self, name: str) -> Any"),
           "A weight of the whole layer, gathered from all ranks, each of which must call it.")
      .def("slice_of", &slice_of, nb::arg("name").none(), nb::arg("rank").none() = nb::none(),
           nb::sig("def slice_of(self, name: str, rank: int | None = None) -> tuple[int, int]"),
           R"(The rows of a weight that a rank has.

Parameters
----------
name : str
rank : int, optional
    This one unless given.

Returns
-------
begin, end : int)")
      .def("clip_gradients", &clip, nb::arg("max_norm").none(),
           nb::sig("def clip_gradients(self, max_norm: float) -> float"),
           "ladon.clip_gradients() by the norm of the whole layer; returns the norm from before. "
           "Every rank must call it.");
  nb::class_<ParallelMultiHeadLayer, ParallelLayer>(
      module, "TensorParallelAttention",
      R"(A MultiHeadAttention whose heads are divided among ranks.

A new layer has zero weights and norm weights of one.

Parameters
----------
communicator : Communicator
options
    Those of the whole MultiHeadAttention, without its seed.)")
      .def("__init__", &make_multi_head, nb::arg("communicator"), nb::arg("kwargs"),
           nb::sig("def __init__(self, communicator: Communicator, **options: Any) -> None"));
  const std::string latent_call =
      "(self, x: Array, key: Array | None = None, value: Array | None = None, *, cache: KvCache | "
      "SpreadKvCache | None = None, " +
      std::string(kLayerCallOptions) +
      ", new_lengths: IntegersLike | None = None, query: Array | None = None, return_weights: bool "
      "= False, reproducible: bool = False, out: Array | None = None, context: Context | None = "
      "None) -> Any";
  const char* const latent_doc =
      R"(AttentionLayer.forward() over ranks.

Parameters
----------
x, key, value : array
    Whole on every rank. All other options are those of AttentionLayer.forward().
cache : KvCache or SpreadKvCache, optional
    A SpreadKvCache over the layer's communicator, ``SpreadKvCache.contiguous(ranks, **layer.cache_options())``, holds some of the latents
    on each rank.
reproducible : bool
    With a SpreadKvCache: the same bits for any number of ranks.

Returns
-------
array
    Whole on every rank.)";
  nb::class_<ParallelLatentLayer, ParallelLayer>(
      module, "TensorParallelLatentAttention",
      R"(A LatentAttention whose heads are divided among ranks.

A new layer has zero weights and norm weights of one.

Parameters
----------
communicator : Communicator
options
    Those of the whole LatentAttention, without its seed.)")
      .def("__init__", &make_latent, nb::arg("communicator"), nb::arg("kwargs"),
           nb::sig("def __init__(self, communicator: Communicator, **options: Any) -> None"))
      .def("forward", &forward_latent, nb::arg("x").none(), nb::arg("key").none() = nb::none(),
           nb::arg("value").none() = nb::none(), nb::arg("kwargs"),
           nb::sig(("def forward" + latent_call).c_str()), latent_doc)
      .def("__call__", &forward_latent, nb::arg("x").none(), nb::arg("key").none() = nb::none(),
           nb::arg("value").none() = nb::none(), nb::arg("kwargs"),
           nb::sig(("def __call__" + latent_call).c_str()), "forward().");
  module.def(
      "load_tensor_parallel_attention", &py_load, nb::arg("communicator"), nb::arg("folder"),
      nb::arg("layer_index"), nb::arg("kwargs"),
      nb::sig("def load_tensor_parallel_attention(communicator: Communicator, folder: str | "
              "os.PathLike[str], layer_index: int, *, dtype: DTypeLike | None = None, "
              "ignored_fields: Sequence[str] = (), rope_context: int = 0, device: DeviceLike = "
              "'cpu') -> TensorParallelLayer"),
      R"(load_attention() over ranks, each of which reads only its own rows of the weights.

Parameters
----------
communicator : Communicator
folder, layer_index, dtype, ignored_fields, rope_context, device
    As load_attention() takes them.

Returns
-------
TensorParallelLayer)");
  module.def(
      "write_tensor_parallel_attention", &py_write, nb::arg("path"), nb::arg("layer").none(),
      nb::arg("family"), nb::arg("layer_index"),
      nb::sig("def write_tensor_parallel_attention(path: str | os.PathLike[str], layer: "
              "TensorParallelLayer, family: str, layer_index: int) -> None"),
      R"(Writes the whole layer's weights to a safetensors file. Rank 0 writes; every rank must call it.

Parameters
----------
path : path
layer : TensorParallelLayer
family : str
    One of model_families(), as which the weights are stored.
layer_index : int
    Of the layer in the model: it is part of the tensors' names.)");
  module.def(
      "save_training", &py_save_training, nb::arg("path"), nb::arg("layer").none(),
      nb::arg("optimiser").none(),
      nb::sig("def save_training(path: str | os.PathLike[str], layer: AttentionLayer, "
              "optimiser: AdamW) -> None"),
      R"(Writes a layer and the state of its optimiser to a file, from which any number of ranks can continue. Every rank must call it.

Parameters
----------
path : path
    Of a safetensors file.
layer : AttentionLayer
optimiser : AdamW
    Of this layer alone.)");
  module.def("load_training", &py_load_training, nb::arg("path"), nb::arg("layer").none(),
             nb::arg("optimiser").none(),
             nb::sig("def load_training(path: str | os.PathLike[str], layer: AttentionLayer, "
                     "optimiser: AdamW) -> None"),
             R"(Continues training where save_training() was called. Every rank must call it.

Parameters
----------
path : path
layer : AttentionLayer
optimiser : AdamW
    Of this layer alone.)");
}

}  // namespace ladon::python
