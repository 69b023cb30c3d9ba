// Sgd, AdamW and clip_gradients over the parameters of layers.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>
#include <utility>

#include "module.h"
#include "optimiser_objects.h"

namespace ladon::python {
namespace {

void make_sgd(SgdHolder* self, nb::handle layers_object, const nb::kwargs& kwargs) {
  Keywords keywords("Sgd", kwargs);
  Layers layers(layers_object, keywords.where("layers"));
  SgdOptions options;
  keywords.read("learning_rate", options.learning_rate);
  keywords.read("momentum", options.momentum);
  keywords.read("weight_decay", options.weight_decay);
  keywords.finish();
  new (self) SgdHolder(std::move(layers), options);
}

void make_adamw(AdamWHolder* self, nb::handle layers_object, const nb::kwargs& kwargs) {
  Keywords keywords("AdamW", kwargs);
  Layers layers(layers_object, keywords.where("layers"));
  AdamWOptions options;
  keywords.read("learning_rate", options.learning_rate);
  keywords.read("beta1", options.beta1);
  keywords.read("beta2", options.beta2);
  keywords.read("epsilon", options.epsilon);
  keywords.read("weight_decay", options.weight_decay);
  keywords.finish();
  new (self) AdamWHolder(std::move(layers), options);
}

template <class H>
void step(H& self) {
  const BoundContext& context = context_of(self.layers.device());
  self.layers.changing_all([&] { self.optimiser.step(context); });
}

template <class H>
double learning_rate(const H& self) {
  return self.optimiser.options().learning_rate;
}

template <class H>
void set_learning_rate(H& self, nb::handle rate) {
  const double value = to_number(rate, {"learning_rate", ""});
  self.layers.changing_all([&] { self.optimiser.set_learning_rate(value); });
}

template <class H>
std::string describe(const H& self, const char* name) {
  return std::string("<ladon.") + name + ": learning_rate " +
         nb::cast<std::string>(nb::str(nb::float_(learning_rate(self)))) + ", " +
         std::to_string(self.layers.parameters().size()) + " parameters>";
}

double py_clip_gradients(nb::handle layers_object, nb::handle max_norm) {
  const Layers layers(layers_object, {"clip_gradients", "layers"});
  if (layers.any_shared()) {
    throw_value_error({"clip_gradients", "layers"},
                      "got a layer that ranks share, expected its own clip_gradients(), which goes "
                      "by the norm of all ranks' gradients");
  }
  const double limit = to_number(max_norm, {"clip_gradients", "max_norm"});
  const BoundContext& context = context_of(layers.device());
  return layers.changing_all([&] { return clip_gradients(context, layers.parameters(), limit); });
}

}  // namespace

void bind_optimisers(nb::module_& module) {
  nb::class_<SgdHolder>(module, "Sgd", R"(Stochastic gradient descent over one or more layers.

Parameters
----------
layers : AttentionLayer or sequence of AttentionLayer
    Whose parameters are trained.
learning_rate : float
momentum : float
    Of the running mean of gradients; 0 is off.
weight_decay : float
    Factor of the weights that is added to their gradients.)")
      .def("__init__", &make_sgd, nb::arg("layers").none(), nb::arg("kwargs"),
           nb::sig("def __init__(self, layers: AttentionLayer | Sequence[AttentionLayer], *, "
                   "learning_rate: float = 0.01, momentum: float = 0.0, weight_decay: float = 0.0) "
                   "-> None"))
      .def("step", &step<SgdHolder>, "One step from the gradients; does not clear them.")
      .def_prop_rw("learning_rate", &learning_rate<SgdHolder>, &set_learning_rate<SgdHolder>,
                   nb::for_setter(nb::arg("rate").none()))
      .def("__repr__", [](const SgdHolder& self) { return describe(self, "Sgd"); });
  nb::class_<AdamWHolder>(module, "AdamW", R"(AdamW over one or more layers.

Parameters
----------
layers : AttentionLayer or sequence of AttentionLayer
    Whose parameters are trained.
learning_rate : float
beta1, beta2 : float
    Decay of the running means of gradients and of their squares.
epsilon : float
    Added to the root of the latter.
weight_decay : float
    Share of a weight that a step removes, times learning_rate.)")
      .def("__init__", &make_adamw, nb::arg("layers").none(), nb::arg("kwargs"),
           nb::sig("def __init__(self, layers: AttentionLayer | Sequence[AttentionLayer], *, "
                   "learning_rate: float = 0.001, beta1: float = 0.9, beta2: float = 0.999, "
                   "epsilon: float = 1e-08, weight_decay: float = 0.01) -> None"))
      .def("step", &step<AdamWHolder>, "One step from the gradients; does not clear them.")
      .def_prop_rw("learning_rate", &learning_rate<AdamWHolder>, &set_learning_rate<AdamWHolder>,
                   nb::for_setter(nb::arg("rate").none()))
      .def_prop_ro("steps_taken",
                   [](const AdamWHolder& self) { return self.optimiser.steps_taken(); })
      .def("__repr__", [](const AdamWHolder& self) { return describe(self, "AdamW"); });
  module.def("clip_gradients", &py_clip_gradients, nb::arg("layers").none(),
             nb::arg("max_norm").none(),
             nb::sig("def clip_gradients(layers: AttentionLayer | Sequence[AttentionLayer], "
                     "max_norm: float) -> float"),
             R"(Scales all gradients so that their joint 2-norm is at most max_norm.

Parameters
----------
layers : AttentionLayer or sequence of AttentionLayer
max_norm : float

Returns
-------
float
    The norm before.)");
}

}  // namespace ladon::python
