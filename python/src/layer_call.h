// What the calls of layers share: their inputs, and what training calls return or write.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <string>
#include <utility>

#include "attention_call.h"
#include "ladon/attention_layer.h"
#include "ladon/error.h"

namespace ladon::python {

/// The keywords of LayerArguments without a cache, as they stand in a signature.
inline constexpr const char* kLayerCallOptions =
    "causal: bool | None = None, mask: Array | None = None, bias: Array | None = None, "
    "kv_lengths: IntegersLike | None = None, query_positions: int | IntegersLike | None = None, "
    "key_positions: int | IntegersLike | None = None, dropout_seed: int = 0";

/// A message of the library with x for the argument that is query in C++.
std::string with_x_for_query(std::string message);

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

/// A call without a cache: messages have x for the argument that is query in C++.
template <class Call>
auto with_name_of_x(const Call& call) {
  try {
    return call();
  } catch (const Error& error) {
    throw Error(error.code(), with_x_for_query(error.what()));
  }
}

/// (out, SavedForward); `given` is the caller's memory for out, where there is any.
inline nb::object give_training(const Array& given, TrainingForward&& result, Framework framework,
                                const BoundContext& context) {
  return nb::make_tuple(
      give_result(given, std::move(result.out), framework, context),
      nb::cast(new SavedForward(std::move(result.saved)), nb::rv_policy::take_ownership));
}

/// The keyword `out` of a backward call, as it stands in a signature.
inline constexpr const char* kGradientOutputs =
    "out: Array | tuple[Array | None, Array | None, Array | None] | None = None";

/// What it gave, or new memory: the gradients of x, key and value.
class InputGradientArrays {
 public:
  explicit InputGradientArrays(Keywords& keywords);

  bool given() const noexcept { return given_; }
  /// With new memory where the caller left out the gradient of an input that the call had.
  InputGradientViews open(const Context& context, DType dtype, const SavedForward& saved);
  /// What a call returned to which nothing was given.
  void take(InputGradients&& gradients);
  /// Those of x, key and value; None where the call had none.
  nb::object give(Framework framework, const BoundContext& context);

 private:
  bool given_ = false;
  std::array<Array, 3> arrays_;
  std::array<Tensor, 3> memory_;
};

}  // namespace ladon::python
