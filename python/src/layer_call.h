// What the calls of layers share: their inputs, and what training calls return.
#pragma once

#include <nanobind/nanobind.h>

#include <utility>

#include "attention_call.h"
#include "ladon/attention_layer.h"

namespace ladon::python {

/// The keywords of LayerArguments without a cache, as they stand in a signature.
inline constexpr const char* kLayerCallOptions =
    "causal: bool | None = None, mask: Array | None = None, bias: Array | None = None, "
    "kv_lengths: IntegersLike | None = None, query_positions: int | IntegersLike | None = None, "
    "key_positions: int | IntegersLike | None = None, dropout_seed: int = 0";

/// The arrays of a call without a cache.
struct InputArrays {
  Array query, key, value;

  InputArrays(nb::handle x, nb::handle key_object, nb::handle value_object,
              const Keywords& keywords)
      : query(required(x, keywords.where("x"))),
        key(Array::input(key_object, keywords.where("key"))),
        value(Array::input(value_object, keywords.where("value"))) {}

  LayerInputs views() const { return {query.view(), key.view(), value.view()}; }
};

/// (out, SavedForward).
inline nb::object give_training(TrainingForward&& result, Framework framework,
                                const BoundContext& context) {
  return nb::make_tuple(
      to_array(std::move(result.out), framework, context),
      nb::cast(new SavedForward(std::move(result.saved)), nb::rv_policy::take_ownership));
}

/// Those of x, key and value; None where the call had none.
inline nb::object give_gradients(InputGradients&& gradients, Framework framework,
                                 const BoundContext& context) {
  const auto give = [&](Tensor&& tensor) {
    return tensor.rank() == 0 ? nb::none() : to_array(std::move(tensor), framework, context);
  };
  return nb::make_tuple(give(std::move(gradients.query)), give(std::move(gradients.key)),
                        give(std::move(gradients.value)));
}

}  // namespace ladon::python
