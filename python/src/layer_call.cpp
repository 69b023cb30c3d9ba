#include "layer_call.h"

#include <cstddef>
#include <string_view>

namespace ladon::python {
namespace {

/// What messages call the gradients of x, key and value.
constexpr std::array<const char*, 3> kNames{"out[0]", "out[1]", "out[2]"};

}  // namespace

std::string with_x_for_query(std::string message) {
  const auto replace = [&](std::string_view text, std::string_view by, std::size_t from) {
    if (const std::size_t at = message.find(text, from); at != std::string::npos) {
      message.replace(at, text.size(), by);
    }
  };
  constexpr std::string_view kArgument = ": query: ";
  const std::size_t end = message.find(": ");  // of the operation
  if (end != std::string::npos && message.compare(end, kArgument.size(), kArgument) == 0) {
    replace(kArgument, ": x: ", end);
  }
  replace("query's", "x's", 0);
  replace("overlaps query,", "overlaps x,", 0);
  return message;
}

InputGradientArrays::InputGradientArrays(Keywords& keywords) {
  const nb::handle out = keywords.take("out");
  given_ = out.is_valid() && !out.is_none();
  if (!given_) return;
  if (!nb::isinstance<nb::tuple>(out)) {
    arrays_[0] = Array::output(out, keywords.where("out"));
    return;
  }
  const auto gradients = nb::borrow<nb::tuple>(out);
  if (gradients.size() != arrays_.size()) {
    throw_value_error(keywords.where("out"),
                      "got a tuple of " + std::to_string(gradients.size()) +
                          ", expected one of three: the gradients of x, key and value");
  }
  for (std::size_t i = 0; i < arrays_.size(); ++i) {
    arrays_[i] = Array::output(gradients[i], keywords.where(kNames[i]));
  }
}

InputGradientViews InputGradientArrays::open(const Context& context, DType dtype,
                                             const SavedForward& saved) {
  const InputShapes shapes = saved.input_shapes();
  const auto view = [&](std::size_t i, const Dims& shape) {
    if (!arrays_[i].absent()) return arrays_[i].writable_view();
    if (shape.rank() != 0) memory_[i] = Tensor::uninitialized(context, dtype, shape);
    return memory_[i].view();
  };
  return {view(0, shapes.query), view(1, shapes.key), view(2, shapes.value)};
}

void InputGradientArrays::take(InputGradients&& gradients) {
  memory_ = {std::move(gradients.query), std::move(gradients.key), std::move(gradients.value)};
}

nb::object InputGradientArrays::give(Framework framework, const BoundContext& context) {
  const auto gradient = [&](std::size_t i) -> nb::object {
    if (arrays_[i].absent() && memory_[i].rank() == 0) return nb::none();
    return give_result(arrays_[i], std::move(memory_[i]), framework, context);
  };
  return nb::make_tuple(gradient(0), gradient(1), gradient(2));
}

}  // namespace ladon::python
