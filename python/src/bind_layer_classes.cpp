// MultiHeadAttention and LatentAttention: their options, and what only one of them has.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <string>
#include <utility>

#include "attention_call.h"
#include "docstrings.h"
#include "ladon/error.h"
#include "ladon/latent_attention.h"
#include "ladon/multi_head_attention.h"
#include "ladon/tensor_parallel.h"
#include "module.h"
#include "objects.h"

namespace ladon::python {
namespace {

void make_multi_head(MultiHeadLayer* self, const nb::kwargs& kwargs) {
  Keywords keywords("MultiHeadAttention", kwargs);
  const MultiHeadAttentionOptions options = to_multi_head_options(keywords);
  std::uint64_t seed = 0;
  DeviceId device;
  keywords.read("seed", seed);
  keywords.read("device", device);
  keywords.finish();
  const BoundContext& context = context_of(device);
  auto layer = without_gil([&] {
    auto made = std::make_unique<MultiHeadAttention>(options, seed);
    if (!device.is_cpu()) made->to(context);
    return made;
  });
  new (self) MultiHeadLayer(std::move(layer));
}

void make_latent(LatentLayer* self, const nb::kwargs& kwargs) {
  Keywords keywords("LatentAttention", kwargs);
  const LatentAttentionOptions options = to_latent_options(keywords);
  std::uint64_t seed = 0;
  DeviceId device;
  keywords.read("seed", seed);
  keywords.read("device", device);
  keywords.finish();
  const BoundContext& context = context_of(device);
  auto layer = without_gil([&] {
    auto made = std::make_unique<LatentAttention>(options, seed);
    if (!device.is_cpu()) made->to(context);
    return made;
  });
  new (self) LatentLayer(std::move(layer));
}

LatentAttention& latent(const LatentLayer& self) {
  return dynamic_cast<LatentAttention&>(*self.layer);
}

nb::object form_of(const LatentLayer& self) {
  const nb::dict options = layer_options(self);
  return nb::borrow(options["form"]);
}

void set_form(LatentLayer& self, nb::handle form) {
  nb::dict dict;
  dict["form"] = form;
  Keywords keywords("LatentAttention.form", dict);
  const LatentForm value = to_latent_options(keywords).form;
  changing(self, [&] { latent(self).set_form(value); });
}

nb::object form_for(const LatentLayer& self, nb::handle query_len, nb::handle kv_len) {
  const std::int64_t queries = to_integer(query_len, {"form_for", "query_len"});
  const std::int64_t keys = to_integer(kv_len, {"form_for", "kv_len"});
  const bool absorbed =
      reading(self, [&] { return latent(self).form_for(queries, keys) == LatentForm::kAbsorbed; });
  return nb::str(absorbed ? "absorbed" : "expanded");
}

nb::object compress(const LatentLayer& self, nb::handle x_object, const nb::kwargs& kwargs) {
  Keywords keywords("compress", kwargs);
  const Array x = required(x_object, keywords.where("x"));
  PositionArgument positions;
  positions.read(keywords, "positions");
  const BoundContext& context = keywords.context(x.device());
  keywords.finish();
  Tensor latents =
      reading(self, [&] { return latent(self).compress(context, x.view(), positions.positions); });
  return to_array(std::move(latents), x.framework(), context);
}

nb::object expand(const LatentLayer& self, nb::handle latents_object, const nb::kwargs& kwargs) {
  Keywords keywords("expand", kwargs);
  const Array latents = required(latents_object, keywords.where("latents"));
  const BoundContext& context = keywords.context(latents.device());
  keywords.finish();
  auto [keys, values] = reading(self, [&] {
    return std::pair{latent(self).expand_keys(context, latents.view()),
                     latent(self).expand_values(context, latents.view())};
  });
  return nb::make_tuple(to_array(std::move(keys), latents.framework(), context),
                        to_array(std::move(values), latents.framework(), context));
}

/// Calls work with the layer as what it is: of one process, or shared by ranks.
template <class Work>
auto with_own_kind(const AttentionLayer& layer, Work&& work) {
  if (const auto* latent = dynamic_cast<const LatentAttention*>(&layer)) return work(*latent);
  return work(dynamic_cast<const MultiHeadAttention&>(layer));
}
template <class Work>
auto with_kind(const AttentionLayer& layer, Work&& work) {
  if (const auto* heads = dynamic_cast<const TensorParallelAttention*>(&layer)) return work(*heads);
  if (const auto* latent = dynamic_cast<const TensorParallelLatentAttention*>(&layer)) {
    return work(*latent);
  }
  return with_own_kind(layer, work);
}

}  // namespace

nb::dict layer_options(const Layer& self) {
  // A form may be set meanwhile, so the options are copied under the lock, and read without.
  return with_kind(*self.layer, [&](const auto& layer) {
    nb::dict dict = options_dict(reading(self, [&] { return layer.options(); }));
    if (!layer.device().is_cpu()) dict["device"] = layer.device().to_string();
    return dict;
  });
}

nb::object copy_layer(const Layer& self) {
  if (self.communicator != nullptr) {
    throw Error(ErrorCode::kUnsupported,
                std::string(self.layer->type_name()) +
                    ".copy: ranks share this layer: make another with its communicator and "
                    "options, and set its parameters");
  }
  auto copy = reading(self, [&] {
    return with_own_kind(*self.layer, [](const auto& layer) -> std::unique_ptr<AttentionLayer> {
      return std::make_unique<std::decay_t<decltype(layer)>>(layer);
    });
  });
  copy->train(self.layer->is_training());
  return wrap_layer(std::move(copy));
}

void bind_layer_classes(nb::module_& module) {
  nb::class_<MultiHeadLayer, Layer>(module, "MultiHeadAttention", doc::kMultiHeadAttention)
      .def("__init__", &make_multi_head, nb::arg("kwargs"),
           nb::sig("def __init__(self, *, embed_dim: int, num_heads: int, num_kv_heads: int = 0, "
                   "head_dim: int = 0, key_dim: int = 0, value_input_dim: int = 0, query_bias: "
                   "bool = False, key_bias: bool = False, value_bias: bool = False, out_bias: bool "
                   "= False, causal: bool = False, rope: RopeOptions | None = None, qk_norm: bool "
                   "= False, qk_norm_epsilon: float = 1e-06, qk_norm_span: QkNormSpan = 'head', "
                   "qk_norm_offset: float = 0.0, qk_norm_centered: bool = False, scale: float | "
                   "None = None, softcap: "
                   "float = 0.0, window_left: int | None = None, window_right: int | None = None, "
                   "alibi_slopes: Array | Sequence[float] | None = None, sinks: bool = False, "
                   "dropout: float = 0.0, dtype: DTypeLike = 'f32', seed: int = 0, device: "
                   "DeviceLike = 'cpu') -> None"));
  nb::class_<LatentLayer, Layer>(module, "LatentAttention", doc::kLatentAttention)
      .def("__init__", &make_latent, nb::arg("kwargs"),
           nb::sig("def __init__(self, *, embed_dim: int, num_heads: int, kv_rank: int, nope_dim: "
                   "int, query_rank: int = 0, rope_dim: int = 0, value_dim: int = 0, query_bias: "
                   "bool = False, kv_bias: bool = False, out_bias: bool = False, query_norm: bool "
                   "= True, kv_norm: bool = True, norm_epsilon: float = 1e-06, causal: bool = "
                   "False, rope: RopeOptions | None = None, scale: float | None = None, dropout: "
                   "float = 0.0, form: LatentForm = 'auto', dtype: DTypeLike = 'f32', seed: int = "
                   "0, device: "
                   "DeviceLike = 'cpu') -> None"))
      .def_prop_rw("form", &form_of, &set_form, nb::for_getter(nb::sig("def form(self) -> str")),
                   nb::for_setter(nb::sig("def form(self, form: LatentForm, /) -> None")),
                   "\"auto\", \"expanded\" or \"absorbed\".")
      .def("form_for", &form_for, nb::arg("query_len"), nb::arg("kv_len"),
           nb::sig("def form_for(self, query_len: int, kv_len: int) -> str"), doc::kFormFor)
      .def_prop_ro(
          "latent_dim", [](const LatentLayer& self) { return latent(self).latent_dim(); },
          "Elements that the cache holds for a token.")
      .def("compress", &compress, nb::arg("x").none(), nb::arg("kwargs"),
           nb::sig("def compress(self, x: Array, *, positions: int | IntegersLike | None = None, "
                   "context: Context | None = None) -> Any"),
           doc::kCompress)
      .def("expand", &expand, nb::arg("latents").none(), nb::arg("kwargs"),
           nb::sig("def expand(self, latents: Array, *, context: Context | None = None) -> "
                   "tuple[Any, Any]"),
           "Latents to keys [batch, seq, num_heads, head_dim] and values [..., value_dim].");
}

}  // namespace ladon::python
