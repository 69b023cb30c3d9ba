// AttentionLayer: what both layers have in common.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "call_docstrings.h"
#include "docstrings.h"
#include "ladon/error.h"
#include "ladon/latent_attention.h"
#include "ladon/multi_head_attention.h"
#include "layer_call.h"
#include "module.h"
#include "objects.h"

namespace ladon::python {
namespace {

/// Where the weights of a forward call go, [batch, num_heads, query_len, kv_len].
Tensor weights_for(const Context& context, const AttentionLayer& layer, const LayerInputs& inputs) {
  const ConstTensorView& query = inputs.query;
  const ConstTensorView& key = inputs.key.absent() ? query : inputs.key;
  if (query.rank() < 2 || query.rank() != key.rank())
    return Tensor(context, DType::kF32, {0, 0, 0, 0});
  const std::int64_t batch = query.rank() == 3 ? query.size(0) : 1;
  return Tensor::uninitialized(
      context, layer.dtype(),
      {batch, layer.num_heads(), query.size(query.rank() - 2), key.size(key.rank() - 2)});
}

nb::object cached_forward(const Layer& self, const Array& x, Cache& cache, const CachedCall& call,
                          const Array& out, const BoundContext& context) {
  Tensor memory;
  without_gil([&] {
    const std::shared_lock layer_lock(self.mutex);
    const std::unique_lock cache_lock(cache.mutex);
    if (out.absent()) {
      memory = self.layer->forward(context, x.view(), cache.cache, call);
    } else {
      self.layer->forward(context, x.view(), cache.cache, call, out.writable_view());
    }
  });
  return give_result(out, std::move(memory), x.framework(), context);
}

nb::object forward(const Layer& self, nb::handle x, nb::handle key, nb::handle value,
                   const nb::kwargs& kwargs) {
  Keywords keywords("forward", kwargs);
  const InputArrays inputs(x, key, value, keywords);
  LayerArguments arguments;
  arguments.read(keywords);
  const nb::handle cache = keywords.take("cache");
  const bool cached = cache.is_valid() && !cache.is_none();
  bool return_weights = false;
  Array out;
  keywords.read("return_weights", return_weights);
  keywords.read_output("out", out);
  const BoundContext& context = keywords.context(inputs.query.device());
  keywords.finish();
  arguments.refuse(keywords, cached);
  if (cached) {
    if (!inputs.key.absent() || !inputs.value.absent()) {
      throw_value_error(keywords.where("key"),
                        "got it together with a cache, expected it left out");
    }
    if (return_weights) {
      throw_value_error(keywords.where("return_weights"), "got it together with a cache");
    }
    return cached_forward(self, inputs.query,
                          object_in<Cache>(cache, keywords.where("cache"), "a ladon.KvCache"),
                          arguments.cached_call(), out, context);
  }
  LayerCall call = arguments.call();
  Tensor weights;
  if (return_weights) {
    weights = weights_for(context, *self.layer, inputs.views());
    call.weights = weights.view();
  }
  Tensor result = with_name_of_x([&] {
    return reading(self, [&] {
      if (out.absent()) return self.layer->forward(context, inputs.views(), call);
      self.layer->forward(context, inputs.views(), call, out.writable_view());
      return Tensor();
    });
  });
  const Framework framework = inputs.query.framework();
  nb::object array = give_result(out, std::move(result), framework, context);
  if (!return_weights) return array;
  return nb::make_tuple(array, to_array(std::move(weights), framework, context));
}

nb::object forward_from(const Layer& self, nb::handle x_object, nb::handle past_object,
                        const nb::kwargs& kwargs) {
  Keywords keywords("forward_from", kwargs);
  const Array x = required(x_object, keywords.where("x"));
  const Cache& past = object_in<Cache>(past_object, keywords.where("past"), "a ladon.KvCache");
  LayerArguments arguments;
  arguments.read(keywords);
  const BoundContext& context = keywords.context(x.device());
  keywords.finish();
  arguments.refuse(keywords, true);
  CachedForward result = without_gil([&] {
    const std::shared_lock layer_lock(self.mutex);
    const std::shared_lock cache_lock(past.mutex);
    return self.layer->forward_from(context, x.view(), past.cache, arguments.cached_call());
  });
  nb::object cache = nb::cast(new Cache(std::move(result.cache), past.capacity, past.spare),
                              nb::rv_policy::take_ownership);
  return nb::make_tuple(to_array(std::move(result.out), x.framework(), context), cache);
}

nb::object forward_training(const Layer& self, nb::handle x, nb::handle key, nb::handle value,
                            const nb::kwargs& kwargs) {
  Keywords keywords("forward_training", kwargs);
  const InputArrays inputs(x, key, value, keywords);
  LayerArguments arguments;
  arguments.read(keywords);
  Array out;
  keywords.read_output("out", out);
  const BoundContext& context = keywords.context(inputs.query.device());
  keywords.finish();
  arguments.refuse(keywords, false);
  TrainingForward result = with_name_of_x([&] {
    return reading(self, [&]() -> TrainingForward {
      const LayerCall call = arguments.call();
      if (out.absent()) return self.layer->forward_training(context, inputs.views(), call);
      return {{}, self.layer->forward_training(context, inputs.views(), call, out.writable_view())};
    });
  });
  return give_training(out, std::move(result), inputs.query.framework(), context);
}

nb::object backward(Layer& self, nb::handle grad_object, nb::handle saved_object,
                    const nb::kwargs& kwargs) {
  Keywords keywords("backward", kwargs);
  const Array grad_out = required(grad_object, keywords.where("grad_out"));
  const SavedForward& saved = object_in<SavedForward>(saved_object, keywords.where("saved"),
                                                      "what forward_training() returned second");
  InputGradientArrays out(keywords);
  const BoundContext& context = keywords.context(grad_out.device());
  keywords.finish();
  if (out.given()) {
    const InputGradientViews views = out.open(context, self.layer->dtype(), saved);
    changing(self, [&] { self.layer->backward(context, grad_out.view(), saved, views); });
  } else {
    out.take(changing(self, [&] { return self.layer->backward(context, grad_out.view(), saved); }));
  }
  return out.give(grad_out.framework(), context);
}

/// Weights or gradients by name; the arrays share the layer's memory and keep it alive.
nb::dict shared_arrays(nb::handle self_object, nb::handle framework, bool gradients) {
  const Framework kind =
      to_framework(framework, {gradients ? "gradients" : "parameters", "framework"});
  auto& self = nb::cast<Layer&>(self_object);
  const std::span<Parameter> all = self.layer->named_parameters();
  if (gradients) {  // zeros before the first backward(), which then goes on in the same memory
    const BoundContext& context = context_of(self.layer->device());
    changing(self, [&] {
      for (Parameter& parameter : all) parameter.make_gradient(context);
    });
  }
  nb::dict dict;
  for (Parameter& parameter : all) {
    Tensor& tensor = gradients ? parameter.gradient : parameter.value;
    dict[parameter.name.c_str()] = share_array(tensor.view(), self_object, kind);
  }
  return dict;
}

void set_parameter(Layer& self, nb::handle name, nb::handle value_object) {
  const std::string text = to_text(name, {"set_parameter", "name"});
  const Array value = required(value_object, {"set_parameter", "value"});
  const BoundContext& context = context_of(self.layer->device());
  changing(self, [&] { self.layer->set_parameter(context, text, value.view()); });
}

nb::dict cache_options(const Layer& self, nb::handle batch, nb::handle dtype) {
  std::optional<KvFormat> wanted;
  if (!dtype.is_none()) wanted = to_dtype(dtype, {"cache_options", "dtype"});
  return options_dict(
      self.layer->cache_options(to_integer(batch, {"cache_options", "batch"}), wanted),
      self.layer->device());
}

nb::object layer_on(const Layer& self, nb::handle device_object) {
  const BoundContext& context = context_of(to_device(device_object, {"to", "device"}));
  nb::object copy = copy_layer(self);
  auto& moved = nb::cast<Layer&>(copy);
  changing(moved, [&] { moved.layer->to(context); });
  return copy;
}

/// What is written in Python.
nb::object in_python(const char* name) { return nb::module_::import_("ladon._state").attr(name); }

std::string describe(const Layer& self) {
  const AttentionLayer& layer = *self.layer;
  return "<ladon." + std::string(layer.type_name()) + ": embed_dim " +
         std::to_string(layer.embed_dim()) + ", num_heads " + std::to_string(layer.num_heads()) +
         ", num_kv_heads " + std::to_string(layer.num_kv_heads()) + ", " + name_of(layer.dtype()) +
         ", " + std::to_string(layer.parameter_count()) + " parameters" +
         (layer.device().is_cpu() ? "" : " on " + layer.device().to_string()) + ">";
}

nb::object py_forward_call(const Layer& self, nb::handle x, nb::handle key, nb::handle value,
                           const nb::kwargs& kwargs) {
  return forward(self, x, key, value, kwargs);
}

}  // namespace

nb::object wrap_layer(std::unique_ptr<AttentionLayer>&& layer) {
  constexpr auto kTake = nb::rv_policy::take_ownership;
  if (dynamic_cast<MultiHeadAttention*>(layer.get()) != nullptr) {
    return nb::cast(new MultiHeadLayer(std::move(layer)), kTake);
  }
  if (dynamic_cast<LatentAttention*>(layer.get()) != nullptr) {
    return nb::cast(new LatentLayer(std::move(layer)), kTake);
  }
  return nb::cast(new Layer(std::move(layer)), kTake);
}

void bind_layers(nb::module_& module) {
  nb::class_<SavedForward>(module, "SavedForward",
                           "What backward() needs of a forward_training() call.")
      .def("__repr__", [](const SavedForward&) {
        return "<ladon.SavedForward: what backward() needs of a forward_training() call>";
      });

  const std::string inputs = "self, x: Array, key: Array | None = None, value: Array | None = None";
  const std::string cached =
      "causal: bool | None = None, mask: Array | None = None, bias: Array | None = None, "
      "new_lengths: IntegersLike | None = None, query: Array | None = None, query_positions: "
      "IntegersLike | None = None";
  const std::string uncached = kLayerCallOptions;
  const std::string call = "(" + inputs + ", *, cache: KvCache | None = None, " + uncached +
                           ", new_lengths: IntegersLike | None = None, query: Array | None = "
                           "None, return_weights: bool = "
                           "False, out: Array | None = None, context: Context | None = None) -> "
                           "Any";
  nb::class_<Layer>(module, "AttentionLayer", "What every attention layer offers.")
      .def("forward", &forward, nb::arg("x").none(), nb::arg("key").none() = nb::none(),
           nb::arg("value").none() = nb::none(), nb::arg("kwargs"),
           nb::sig(("def forward" + call).c_str()), doc::kForward)
      .def("__call__", &py_forward_call, nb::arg("x").none(), nb::arg("key").none() = nb::none(),
           nb::arg("value").none() = nb::none(), nb::arg("kwargs"),
           nb::sig(("def __call__" + call).c_str()), "forward().")
      .def("forward_from", &forward_from, nb::arg("x").none(), nb::arg("past").none(),
           nb::arg("kwargs"),
           nb::sig(("def forward_from(self, x: Array, past: KvCache, *, " + cached +
                    ", context: Context | None = None) -> tuple[Any, KvCache]")
                       .c_str()),
           doc::kForwardFrom)
      .def("forward_training", &forward_training, nb::arg("x").none(),
           nb::arg("key").none() = nb::none(), nb::arg("value").none() = nb::none(),
           nb::arg("kwargs"),
           nb::sig(("def forward_training(" + inputs + ", *, " + uncached +
                    ", out: Array | None = None, context: Context | None = None) -> tuple[Any, "
                    "SavedForward]")
                       .c_str()),
           doc::kForwardTraining)
      .def("backward", &backward, nb::arg("grad_out").none(), nb::arg("saved").none(),
           nb::arg("kwargs"),
           nb::sig(("def backward(self, grad_out: Array, saved: SavedForward, *, " +
                    std::string(kGradientOutputs) +
                    ", context: Context | None = None) -> tuple[Any, Any, Any]")
                       .c_str()),
           doc::kBackward)
      .def(
          "parameters",
          [](nb::handle_t<Layer> self, nb::handle framework) {
            return shared_arrays(self, framework, false);
          },
          nb::arg("framework") = "numpy",
          nb::sig("def parameters(self, framework: Framework = 'numpy') -> dict[str, Any]"),
          "The weights by name. The arrays share the layer's memory: writing to one changes the "
          "layer.")
      .def(
          "gradients",
          [](nb::handle_t<Layer> self, nb::handle framework) {
            return shared_arrays(self, framework, true);
          },
          nb::arg("framework") = "numpy",
          nb::sig("def gradients(self, framework: Framework = 'numpy') -> dict[str, Any]"),
          "The parameters' gradients by name; they share the layer's memory too.")
      .def("set_parameter", &set_parameter, nb::arg("name").none(), nb::arg("value").none(),
           nb::sig("def set_parameter(self, name: str, value: Array) -> None"), doc::kSetParameter)
      .def(
          "zero_grad",
          [](Layer& self) {
            const BoundContext& context = context_of(self.layer->device());
            changing(self, [&] { self.layer->zero_grad(context); });
          },
          "Clears the gradients.")
      .def(
          "train",
          [](Layer& self, bool training) { changing(self, [&] { self.layer->train(training); }); },
          nb::arg("training") = true,
          "Training mode, which is the default: dropout acts. train(False) is eval().")
      .def(
          "eval", [](Layer& self) { changing(self, [&] { self.layer->eval(); }); },
          "Evaluation mode, without dropout.")
      .def("cache_options", &cache_options, nb::arg("batch") = 1,
           nb::arg("dtype").none() = nb::none(),
           nb::sig("def cache_options(self, batch: int = 1, dtype: DTypeLike | None = None) -> "
                   "dict[str, Any]"),
           doc::kCacheOptions)
      .def_prop_ro(
          "options", &layer_options, nb::sig("def options(self) -> dict[str, Any]"),
          "With every default filled in: ``type(layer)(**layer.options)`` is such a layer.")
      .def("to", &layer_on, nb::arg("device"), nb::sig("def to(self, device: DeviceLike) -> Self"),
           "A copy on another device: 'cpu', 'cuda' or 'cuda:1'. The layer itself stays.")
      .def_prop_ro("device", [](const Layer& self) { return self.layer->device().to_string(); })
      .def("copy", &copy_layer, nb::sig("def copy(self) -> Self"),
           "A deep copy: a separate layer with the same weights and gradients.")
      .def(
          "__deepcopy__",
          [](nb::handle_t<Layer> self, nb::handle memo) {
            return in_python("deep_copy_layer")(self, memo);
          },
          nb::arg("memo").none(), nb::sig("def __deepcopy__(self, memo: Any) -> Self"))
      .def(
          "state_dict",
          [](nb::handle_t<Layer> self, nb::handle framework) {
            return in_python("state_dict")(self, framework);
          },
          nb::arg("framework") = "numpy",
          nb::sig("def state_dict(self, framework: Framework = 'numpy') -> dict[str, Any]"),
          "The weights by name, sharing the layer's memory, as torch.nn.Module.state_dict() does.")
      .def(
          "load_state_dict",
          [](nb::handle_t<Layer> self, nb::handle state, bool strict) {
            in_python("load_state_dict")(self, state, strict);
          },
          nb::arg("state"), nb::arg("strict") = true,
          nb::sig("def load_state_dict(self, state: Mapping[str, Array], strict: bool = True) -> "
                  "None"),
          doc::kLoadStateDict)
      .def(
          "__reduce__", [](nb::handle_t<Layer> self) { return in_python("reduce_layer")(self); },
          nb::sig("def __reduce__(self) -> Any"))
      .def_prop_ro("training", [](const Layer& self) { return self.layer->is_training(); })
      .def_prop_ro("embed_dim", [](const Layer& self) { return self.layer->embed_dim(); })
      .def_prop_ro("num_heads", [](const Layer& self) { return self.layer->num_heads(); })
      .def_prop_ro("num_kv_heads", [](const Layer& self) { return self.layer->num_kv_heads(); })
      .def_prop_ro("head_dim", [](const Layer& self) { return self.layer->head_dim(); })
      .def_prop_ro("value_dim", [](const Layer& self) { return self.layer->value_dim(); })
      .def_prop_ro("dtype", [](const Layer& self) { return name_of(self.layer->dtype()); })
      .def_prop_ro("parameter_count",
                   [](const Layer& self) { return self.layer->parameter_count(); })
      .def("__repr__", &describe);
}

}  // namespace ladon::python
