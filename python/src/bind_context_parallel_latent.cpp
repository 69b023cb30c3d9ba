// LatentAttention over ranks that each hold some of the tokens.
#include <nanobind/nanobind.h>

#include <string>
#include <utility>

#include "communicator_objects.h"
#include "ladon/context_parallel_latent.h"
#include "layer_call.h"
#include "module.h"
#include "objects.h"

namespace ladon::python {
namespace {

LatentLayer& latent_in(nb::handle object, const Keywords& keywords) {
  return object_in<LatentLayer>(object, keywords.where("layer"), "a ladon.LatentAttention");
}
LatentAttention& attention_of(const LatentLayer& layer) {
  return dynamic_cast<LatentAttention&>(*layer.layer);
}

/// Reads the arguments that both kinds of forward have, calls run(context, ranks, layer, inputs,
/// plan, call, views of `out` if given) without the GIL, and gives its result.
template <class Run, class Give>
nb::object forward_over(const char* name, nb::handle communicator, nb::handle layer_object,
                        nb::handle x, nb::handle key, const nb::kwargs& kwargs, const Run& run,
                        const Give& give) {
  Keywords keywords(name, kwargs);
  const auto ranks = ranks_in(communicator, keywords.where("communicator"));
  const LatentLayer& layer = latent_in(layer_object, keywords);
  const InputArrays inputs(x, key, nb::none(), keywords);
  const ContextPlan plan = to_plan(keywords);
  LayerArguments arguments;
  arguments.read(keywords);
  Array out;
  keywords.read_output("out", out);
  const BoundContext& context = keywords.context(inputs.query.device());
  keywords.finish();
  arguments.refuse(keywords, false);
  auto result = with_name_of_x([&] {
    return reading(layer, [&] {
      return run(context, *ranks, attention_of(layer), inputs.views(), plan, arguments.call(), out);
    });
  });
  return give(out, std::move(result), inputs.query.framework(), context);
}

nb::object py_forward(nb::handle communicator, nb::handle layer, nb::handle x, nb::handle key,
                      const nb::kwargs& kwargs) {
  return forward_over(
      "context_parallel_forward", communicator, layer, x, key, kwargs,
      [](const Context& context, Communicator& ranks, const LatentAttention& whole,
         const LayerInputs& inputs, const ContextPlan& plan, const LayerCall& call,
         const Array& out) {
        if (out.absent())
          return context_parallel_forward(context, ranks, whole, inputs, plan, call);
        context_parallel_forward(context, ranks, whole, inputs, plan, call, out.writable_view());
        return Tensor();
      },
      &give_result);
}

nb::object py_forward_training(nb::handle communicator, nb::handle layer, nb::handle x,
                               nb::handle key, const nb::kwargs& kwargs) {
  return forward_over(
      "context_parallel_forward_training", communicator, layer, x, key, kwargs,
      [](const Context& context, Communicator& ranks, const LatentAttention& whole,
         const LayerInputs& inputs, const ContextPlan& plan, const LayerCall& call,
         const Array& out) -> TrainingForward {
        if (out.absent()) {
          return context_parallel_forward_training(context, ranks, whole, inputs, plan, call);
        }
        return {{},
                context_parallel_forward_training(context, ranks, whole, inputs, plan, call,
                                                  out.writable_view())};
      },
      &give_training);
}

nb::object py_backward(nb::handle communicator, nb::handle layer_object, nb::handle grad_object,
                       nb::handle saved_object, const nb::kwargs& kwargs) {
  Keywords keywords("context_parallel_backward", kwargs);
  const auto ranks = ranks_in(communicator, keywords.where("communicator"));
  LatentLayer& layer = latent_in(layer_object, keywords);
  const Array grad_out = required(grad_object, keywords.where("grad_out"));
  const SavedForward& saved =
      object_in<SavedForward>(saved_object, keywords.where("saved"),
                              "what context_parallel_forward_training() returned second");
  InputGradientArrays out(keywords);
  const BoundContext& context = keywords.context(grad_out.device());
  keywords.finish();
  LatentAttention& whole = attention_of(layer);
  if (out.given()) {
    const InputGradientViews views = out.open(context, whole.dtype(), saved);
    changing(layer, [&] {
      context_parallel_backward(context, *ranks, whole, grad_out.view(), saved, views);
    });
  } else {
    out.take(changing(layer, [&] {
      return context_parallel_backward(context, *ranks, whole, grad_out.view(), saved);
    }));
  }
  return out.give(grad_out.framework(), context);
}

}  // namespace

void bind_context_parallel_latent(nb::module_& module) {
  const auto signature = [](const char* name, const char* result) {
    return std::string("def ") + name +
           "(communicator: Communicator, layer: LatentAttention, x: Array, key: Array | None = "
           "None, *, plan: ContextPlan, " +
           kLayerCallOptions + ", out: Array | None = None, context: Context | None = None) -> " +
           result;
  };
  const auto define = [&](const char* name, auto function, const char* result, const char* doc) {
    module.def(name, function, nb::arg("communicator"), nb::arg("layer").none(),
               nb::arg("x").none(), nb::arg("key").none() = nb::none(), nb::arg("kwargs"),
               nb::sig(signature(name, result).c_str()), doc);
  };
  define(
      "context_parallel_forward", &py_forward, "Any",
      R"(A LatentAttention over ranks that each hold some of the tokens; every rank has the whole layer.

x, key and the result are this rank's tokens, in the order of its ranges in the plan (take_tokens() picks them); mask,
bias, lengths and positions are those of all tokens. Ranks gather latents, not keys and values. The result has the bits of
the layer in one process.

Parameters
----------
communicator : Communicator
layer : LatentAttention
    The same on every rank.
x, key : array
    This rank's tokens. All other options are those of AttentionLayer.forward().
plan : ContextPlan
    From plan_context().
out : array, optional
    Takes the result.

Returns
-------
array
    This rank's tokens.)");
  define("context_parallel_forward_training", &py_forward_training, "tuple[Any, SavedForward]",
         R"(context_parallel_forward() that also saves what context_parallel_backward() needs.

Parameters
----------
communicator, layer, x, key, plan, out
    As context_parallel_forward() takes them, with the options of AttentionLayer.forward().

Returns
-------
out : array
saved : SavedForward)");
  module.def(
      "context_parallel_backward", &py_backward, nb::arg("communicator"), nb::arg("layer").none(),
      nb::arg("grad_out").none(), nb::arg("saved").none(), nb::arg("kwargs"),
      nb::sig(("def context_parallel_backward(communicator: Communicator, layer: "
               "LatentAttention, grad_out: Array, saved: SavedForward, *, " +
               std::string(kGradientOutputs) +
               ", context: Context | None = None) -> tuple[Any, Any, Any]")
                  .c_str()),
      R"(The gradients of this rank's inputs; adds those of all tokens to the parameters' gradients, the same on every rank.

Parameters
----------
communicator : Communicator
layer : LatentAttention
grad_out : array
    The gradient of this rank's output.
saved : SavedForward
    From context_parallel_forward_training().
out : tuple of three (array or None), optional
    As AttentionLayer.backward() takes it.
context : Context, optional

Returns
-------
dx, dkey, dvalue : array or None
    None for an input that the call did not have.)");
}

}  // namespace ladon::python
