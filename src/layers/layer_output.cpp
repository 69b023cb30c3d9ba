#include "layers/layer_output.h"

#include <string>
#include <utility>

#include "layers/rows.h"

namespace ladon {

LayerOutput LayerOutput::unwanted() {
  LayerOutput none;
  none.kind_ = Kind::kUnwanted;
  return none;
}

LayerOutput LayerOutput::if_given(const TensorView& given) {
  return given.absent() ? unwanted() : LayerOutput(given);
}

void LayerOutput::check(const Operation& operation, std::string_view name,
                        const AttentionLayer& layer, DType dtype, const Dims& shape,
                        std::span<const NamedView> inputs) const {
  if (!given()) return;
  const NamedView output{name, view_};
  check_tensor(operation, output, dtype, shape);
  check_no_self_overlap(operation, output);
  for (const NamedView& input : inputs) check_apart(operation, output, input);
  for (const Parameter& parameter : layer.named_parameters()) {
    check_apart(operation, output, {parameter.name, parameter.value});
    check_apart(operation, output, {parameter.name + "'s gradient", parameter.gradient});
  }
}

TensorView LayerOutput::open(const Context& context, DType dtype, const Dims& shape) {
  if (given()) return view_;
  made_ = Tensor::uninitialized(context, dtype, shape);
  return made_;
}

void LayerOutput::publish(const Context& context, Tensor&& result) {
  if (given()) {
    copy(context, result, view_);
  } else if (wanted()) {
    made_ = std::move(result);
  }
}

InputGradientOutputs::InputGradientOutputs(const InputGradientViews& given)
    : query(LayerOutput::if_given(given.query)),
      key(LayerOutput::if_given(given.key)),
      value(LayerOutput::if_given(given.value)) {}

InputGradientOutputs InputGradientOutputs::staged() const {
  InputGradientOutputs made;
  if (!query.wanted()) made.query = LayerOutput::unwanted();
  if (!key.wanted()) made.key = LayerOutput::unwanted();
  if (!value.wanted()) made.value = LayerOutput::unwanted();
  return made;
}

void InputGradientOutputs::publish(const Context& context, InputGradients&& results) {
  query.publish(context, std::move(results.query));
  key.publish(context, std::move(results.key));
  value.publish(context, std::move(results.value));
}

std::string InputGradientOutputs::wanted() const {
  return std::string(query.wanted() ? " query" : "") + (key.wanted() ? " key" : "") +
         (value.wanted() ? " value" : "");
}

OutputRows::OutputRows(const Context& context, const TensorView& out)
    : out_(out), view_(as_rows(out)) {
  if (!view_.absent()) return;
  temporary_ = Tensor::uninitialized(context, out.dtype(), out.shape());
  view_ = rows_of(temporary_);
}

void OutputRows::finish(const Context& context) const {
  if (temporary_.rank() != 0) copy(context, temporary_, out_);
}

void check_output(const Operation& operation, const AttentionLayer& layer,
                  const LayerInputs& inputs, const LayerCall& call, const LayerOutput& out) {
  const NamedView others[] = {{"query", inputs.query}, {"key", inputs.key},
                              {"value", inputs.value}, {"mask", call.mask},
                              {"bias", call.bias},     {"weights", call.weights}};
  out.check(operation, "out", layer, layer.dtype(), inputs.query.shape(), others);
}

}  // namespace ladon
