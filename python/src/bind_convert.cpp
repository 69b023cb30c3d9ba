// Conversions between kinds of attention. ladon/convert.py gives them their names.
#include <nanobind/nanobind.h>
#include <nanobind/stl/filesystem.h>

#include <filesystem>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <utility>
#include <vector>

#include "attention_call.h"
#include "ladon/convert.h"
#include "module.h"
#include "objects.h"

namespace ladon::python {
namespace {

struct BoundCalibration {
  explicit BoundCalibration(Calibration&& made) : calibration(std::move(made)) {}

  Calibration calibration;
  mutable std::shared_mutex mutex;
};

constexpr Names<HeadMerge, 3> kMerges = {
    {{"pca", HeadMerge::kPca}, {"mean", HeadMerge::kMean}, {"first", HeadMerge::kFirst}}};
constexpr Names<HeadGrouping, 2> kGroupings = {
    {{"best", HeadGrouping::kBest}, {"consecutive", HeadGrouping::kConsecutive}}};
constexpr Names<RopeChoice, 3> kChoices = {{{"score_error", RopeChoice::kScoreError},
                                            {"energy", RopeChoice::kEnergy},
                                            {"each_frequency", RopeChoice::kEachFrequency}}};

nb::list list_of(const std::vector<std::int64_t>& values) {
  nb::list list;
  for (const std::int64_t value : values) list.append(value);
  return list;
}

nb::dict summary_dict(const ConversionSummary& summary) {
  nb::dict dict;
  dict["exact"] = summary.exact;
  dict["cache_before"] = summary.cache_before;
  dict["cache_after"] = summary.cache_after;
  dict["discarded"] = summary.discarded;
  dict["rope_discarded"] = summary.rope_discarded;
  nb::list spectrum;
  for (const double energy : summary.spectrum) spectrum.append(energy);
  dict["spectrum"] = spectrum;
  dict["head_order"] = list_of(summary.head_order);
  return dict;
}

nb::dict summary_dict(const BalanceSummary& summary) {
  nb::dict dict;
  dict["keys_balanced"] = summary.keys_balanced;
  dict["largest_factor"] = summary.largest_factor;
  dict["key_spread_before"] = summary.key_spread_before;
  dict["key_spread_after"] = summary.key_spread_after;
  dict["value_spread_before"] = summary.value_spread_before;
  dict["value_spread_after"] = summary.value_spread_after;
  dict["limited"] = summary.limited;
  return dict;
}

/// The layer and its summary.
template <class Converted>
nb::tuple give(Converted&& converted) {
  using Kind = decltype(converted.layer);
  return nb::make_tuple(wrap_layer(std::make_unique<Kind>(std::move(converted.layer))),
                        summary_dict(converted.summary));
}

template <class Kind>
const Kind& layer_as(const Layer& layer, const Where& where) {
  const auto* const kind = dynamic_cast<const Kind*>(layer.layer.get());
  if (kind == nullptr) {
    throw_value_error(where, "got a " + std::string(layer.layer->type_name()) +
                                 ", which this function does not convert");
  }
  return *kind;
}

/// Runs a conversion that reads the layer and the calibration, where there is one.
template <class Work>
decltype(auto) converting(const Layer& layer, Keywords& keywords, Work&& work) {
  const nb::handle object = keywords.take("calibration");
  const BoundCalibration* calibration = nullptr;
  if (object.is_valid() && !object.is_none()) {
    calibration = &object_in<BoundCalibration>(object, keywords.where("calibration"),
                                               "a ladon.convert.Calibration");
  }
  keywords.finish();
  const BoundContext& context = context_of(layer.layer->device());
  return without_gil([&] {
    const std::shared_lock layer_lock(layer.mutex);
    std::shared_lock<std::shared_mutex> lock;
    if (calibration != nullptr) lock = std::shared_lock(calibration->mutex);
    return work(context, calibration == nullptr ? nullptr : &calibration->calibration);
  });
}

nb::object py_to_mha(const Layer& layer) {
  const BoundContext& context = context_of(layer.layer->device());
  auto made = reading(layer, [&] {
    const auto* const latent = dynamic_cast<const LatentAttention*>(layer.layer.get());
    return std::make_unique<MultiHeadAttention>(
        latent != nullptr ? to_mha(context, *latent)
                          : to_mha(context, dynamic_cast<const MultiHeadAttention&>(*layer.layer)));
  });
  return wrap_layer(std::move(made));
}

nb::object py_to_mqa(const Layer& layer) {
  const auto& latent = layer_as<LatentAttention>(layer, {"to_mqa", "layer"});
  const BoundContext& context = context_of(layer.layer->device());
  return wrap_layer(reading(
      layer, [&] { return std::make_unique<MultiHeadAttention>(to_mqa(context, latent)); }));
}

nb::tuple py_to_gqa(const Layer& layer, nb::handle num_kv_heads, const nb::kwargs& kwargs) {
  Keywords keywords("to_gqa", kwargs);
  GqaConversion conversion;
  conversion.num_kv_heads = to_integer(num_kv_heads, keywords.where("num_kv_heads"));
  keywords.read("merge", conversion.merge, kMerges);
  keywords.read("grouping", conversion.grouping, kGroupings);
  const auto& source = layer_as<MultiHeadAttention>(layer, keywords.where("layer"));
  return give(converting(layer, keywords, [&](const Context& context, const Calibration* given) {
    return to_gqa(context, source, conversion, given);
  }));
}

nb::tuple py_to_mla(const Layer& layer, const nb::kwargs& kwargs) {
  Keywords keywords("to_mla", kwargs);
  MlaConversion conversion;
  keywords.read("kv_rank", conversion.kv_rank);
  keywords.read("rope_dim", conversion.rope_dim);
  keywords.read("choice", conversion.choice, kChoices);
  keywords.read("positions", conversion.context);
  const auto& source = layer_as<MultiHeadAttention>(layer, keywords.where("layer"));
  return give(converting(layer, keywords, [&](const Context& context, const Calibration* given) {
    return to_mla(context, source, conversion, given);
  }));
}

nb::tuple py_reduce_rank(const Layer& layer, nb::handle kv_rank, const nb::kwargs& kwargs) {
  Keywords keywords("reduce_rank", kwargs);
  const std::int64_t rank = to_integer(kv_rank, keywords.where("kv_rank"));
  const auto& source = layer_as<LatentAttention>(layer, keywords.where("layer"));
  return give(converting(layer, keywords, [&](const Context& context, const Calibration* given) {
    return reduce_rank(context, source, rank, given);
  }));
}

nb::tuple py_balance_channels(const Layer& layer, const nb::kwargs& kwargs) {
  Keywords keywords("balance_channels", kwargs);
  const auto& source = layer_as<MultiHeadAttention>(layer, keywords.where("layer"));
  return give(converting(layer, keywords, [&](const Context& context, const Calibration* given) {
    return balance_channels(context, source, given);
  }));
}

void py_refit_output(const Layer& before, Layer& after, nb::handle inputs, nb::handle ridge) {
  const Where where{"refit_output", "inputs"};
  if (&before == &after) {
    throw_value_error({"refit_output", "after"}, "got the same layer as before, expected another");
  }
  std::optional<double> share;
  if (!ridge.is_none()) share = to_number(ridge, {"refit_output", "ridge"});
  std::vector<Array> arrays;
  for (const nb::handle item : nb::iter(inputs)) arrays.push_back(required(item, where));
  const BoundContext& context = context_of(after.layer->device());
  without_gil([&] {
    const std::shared_lock source(before.mutex);
    const std::unique_lock target(after.mutex);
    OutputFit fit(*before.layer, *after.layer);
    for (const Array& array : arrays) fit.add(context, array.view());
    fit.apply(context, *after.layer, share);
  });
}

nb::dict py_compare_layers(const Layer& before, const Layer& after, nb::handle x,
                           const nb::kwargs& kwargs) {
  Keywords keywords("compare_layers", kwargs);
  const Array array = required(x, keywords.where("x"));
  std::vector<std::int64_t> order;
  keywords.read("head_order", order);
  keywords.finish();
  const BoundContext& context = context_of(after.layer->device());
  const LayerComparison loss = without_gil([&] {
    const std::shared_lock source(before.mutex);
    const std::shared_lock target(after.mutex);
    return compare_layers(context, *before.layer, *after.layer, array.view(), order);
  });
  nb::dict dict;
  dict["output_error"] = loss.output_error;
  dict["output_error_after_first"] = loss.output_error_after_first;
  dict["weights_divergence"] = loss.weights_divergence;
  dict["cache_before"] = loss.cache_before;
  dict["cache_after"] = loss.cache_after;
  return dict;
}

void bind_calibration(nb::module_& module) {
  using Path = std::filesystem::path;
  nb::class_<BoundCalibration>(module, "Calibration",
                               "Second moments of a layer's inputs: what conversions fit to.")
      .def(
          "__init__",
          [](BoundCalibration* self, nb::handle width) {
            new (self) BoundCalibration(Calibration(to_integer(width, {"Calibration", "width"})));
          },
          nb::arg("width"), nb::sig("def __init__(self, width: int) -> None"))
      .def(
          "add",
          [](BoundCalibration& self, nb::handle x) {
            const Array array = required(x, {"Calibration.add", "x"});
            const BoundContext& context = context_of(array.device());
            changing(self, [&] { self.calibration.add(context, array.view()); });
          },
          nb::arg("x").none(), nb::sig("def add(self, x: Array) -> None"),
          "Adds inputs, [seq, width] or [batch, seq, width].")
      .def(
          "merge",
          [](BoundCalibration& self, const BoundCalibration& other) {
            if (&self == &other) {
              throw_value_error({"Calibration.merge", "other"}, "got itself, expected another");
            }
            changing(self, [&] {
              const std::shared_lock lock(other.mutex);
              self.calibration.merge(other.calibration);
            });
          },
          nb::arg("other"), nb::sig("def merge(self, other: Calibration) -> None"),
          "Adds what another one has seen.")
      .def(
          "save",
          [](const BoundCalibration& self, const Path& path) {
            reading(self, [&] { self.calibration.save(path); });
          },
          nb::arg("path"), nb::sig("def save(self, path: str | os.PathLike[str]) -> None"),
          "Writes a safetensors file.")
      .def_static(
          "load",
          [](const Path& path) {
            auto made = std::make_unique<BoundCalibration>(
                without_gil([&] { return Calibration::load(path); }));
            return nb::cast(made.release(), nb::rv_policy::take_ownership);
          },
          nb::arg("path"), nb::sig("def load(path: str | os.PathLike[str]) -> Calibration"),
          "What save() wrote.")
      .def_prop_ro("width", [](const BoundCalibration& self) { return self.calibration.width(); })
      .def_prop_ro("tokens", [](const BoundCalibration& self) {
        return reading(self, [&] { return self.calibration.tokens(); });
      });
}

}  // namespace

void bind_convert(nb::module_& module) {
  bind_calibration(module);
  module.def("to_mha", &py_to_mha, nb::arg("layer"),
             nb::sig("def to_mha(layer: AttentionLayer) -> MultiHeadAttention"),
             "One KV head for each query head; exact.");
  module.def("to_mqa", &py_to_mqa, nb::arg("layer"),
             nb::sig("def to_mqa(layer: LatentAttention) -> MultiHeadAttention"),
             "The absorbed form of a latent layer without norms as weights; exact.");
  module.def(
      "to_gqa", &py_to_gqa, nb::arg("layer"), nb::arg("num_kv_heads").none(), nb::arg("kwargs"),
      nb::sig("def to_gqa(layer: MultiHeadAttention, num_kv_heads: int, *, merge: HeadMerge = "
              "'pca', grouping: HeadGrouping = 'best', calibration: Calibration | None = None) -> "
              "tuple[MultiHeadAttention, dict[str, Any]]"),
      R"(Fewer KV heads by merging groups of them, or more by repetition.

Parameters
----------
layer : MultiHeadAttention
num_kv_heads : int
merge : {"pca", "mean", "first"}
    How a group becomes one head.
grouping : {"best", "consecutive"}
    Which heads are a group.
calibration : Calibration, optional
    What inputs look like; the weights alone decide without it.

Returns
-------
layer : MultiHeadAttention
summary : dict)");
  module.def(
      "to_mla", &py_to_mla, nb::arg("layer"), nb::arg("kwargs"),
      nb::sig("def to_mla(layer: MultiHeadAttention, *, kv_rank: int | None = None, "
              "rope_dim: int | None = None, choice: RopeChoice = 'score_error', positions: int = "
              "0, calibration: Calibration | None = None) -> tuple[LatentAttention, "
              "dict[str, Any]]"),
      R"(As latent attention; exact where both sizes are left out.

Parameters
----------
layer : MultiHeadAttention
kv_rank, rope_dim : int, optional
    Sizes of the latent and of the rope key.
choice : {"score_error", "energy", "each_frequency"}
    Of the pairs that stay roped: by the error of scores over `positions` tokens, by their energy, or one for each frequency.
positions : int
    For "score_error".
calibration : Calibration, optional
    What inputs look like; the weights alone decide without it.

Returns
-------
layer : LatentAttention
summary : dict)");
  module.def("reduce_rank", &py_reduce_rank, nb::arg("layer"), nb::arg("kv_rank").none() = 0,
             nb::arg("kwargs"),
             nb::sig("def reduce_rank(layer: LatentAttention, kv_rank: int = 0, *, calibration: "
                     "Calibration | None = None) -> tuple[LatentAttention, dict[str, Any]]"),
             R"(Gives a latent layer a smaller kv_rank.

Parameters
----------
layer : LatentAttention
kv_rank : int
    0 is the numerical rank, which is exact.
calibration : Calibration, optional
    What inputs look like; the weights alone decide without it.

Returns
-------
layer : LatentAttention
summary : dict)");
  module.def(
      "balance_channels", &py_balance_channels, nb::arg("layer"), nb::arg("kwargs"),
      nb::sig("def balance_channels(layer: MultiHeadAttention, *, calibration: Calibration "
              "| None = None) -> tuple[MultiHeadAttention, dict[str, Any]]"),
      R"(Makes channels of keys and values about equally large, so that int8 caches lose less.

Factors are powers of two, which leave every output as it was over caches of floats.

Parameters
----------
layer : MultiHeadAttention
calibration : Calibration, optional
    What inputs look like; the weights alone decide without it.

Returns
-------
layer : MultiHeadAttention
summary : dict
    Largest factor, and the spread of keys and values before and after.)");
  module.def("refit_output", &py_refit_output, nb::arg("before"), nb::arg("after"),
             nb::arg("inputs"), nb::arg("ridge").none() = nb::none(),
             nb::sig("def refit_output(before: AttentionLayer, after: AttentionLayer, inputs: "
                     "Iterable[Array], ridge: float | None = None) -> None"),
             R"(Refits the output projection of a converted layer, in place.

Parameters
----------
before, after : AttentionLayer
    The layer before and after the conversion.
inputs : iterable of array
    Each [seq, embed_dim] or [batch, seq, embed_dim].
ridge : float, optional
    Strength with which the projection stays as it is; chosen on some of the sequences unless given.)");
  module.def("compare_layers", &py_compare_layers, nb::arg("before"), nb::arg("after"),
             nb::arg("x").none(), nb::arg("kwargs"),
             nb::sig("def compare_layers(before: AttentionLayer, after: AttentionLayer, x: Array, "
                     "*, head_order: Sequence[int] = ()) -> dict[str, Any]"),
             R"(What a conversion lost.

Parameters
----------
before, after : AttentionLayer
    The layer before and after the conversion.
x : array [seq, embed_dim] or [batch, seq, embed_dim]
    Inputs that the conversion has not seen.
head_order : sequence of int
    From the conversion's summary, where heads changed places.

Returns
-------
dict
    Relative errors of the output, and the divergence of the attention weights.)");
  module.def(
      "cache_elements",
      [](const Layer& layer) {
        return reading(layer, [&] { return cache_elements(*layer.layer); });
      },
      nb::arg("layer"), nb::sig("def cache_elements(layer: AttentionLayer) -> int"),
      "Elements that a cache of the layer holds for a token.");
}

}  // namespace ladon::python
