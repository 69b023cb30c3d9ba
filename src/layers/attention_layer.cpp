#include "ladon/attention_layer.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/checks.h"
#include "core/fail.h"
#include "layers/saved_forward.h"

namespace ladon {

SavedForward::Impl::~Impl() = default;

void SavedForward::Impl::keep_call(const Context& context, const AttentionOptions& attention,
                                   const LayerCall& call) {
  options = attention;
  options.sinks = {};
  options.alibi_slopes = {};
  if (!call.mask.absent()) {
    mask_ = Tensor::copy_of(context, call.mask);
    options.mask = mask_;
  }
  if (!call.bias.absent()) {
    bias_ = Tensor::copy_of(context, call.bias);
    options.bias = bias_;
  }
  kv_lengths_.assign(call.kv_lengths.begin(), call.kv_lengths.end());
  options.kv_lengths = kv_lengths_;
  const auto keep = [](const RopePositions& from, std::vector<std::int64_t>& list) {
    list.assign(from.explicit_positions.begin(), from.explicit_positions.end());
    return RopePositions{.first = from.first, .explicit_positions = list};
  };
  query_positions = keep(call.query_positions, query_position_list_);
  key_positions = keep(call.key_positions, key_position_list_);
}

std::uint64_t SavedForward::Impl::generation_of(const AttentionLayer& layer) noexcept {
  std::uint64_t sum = 0;  // generations only grow
  for (const Parameter& parameter : layer.named_parameters()) sum += parameter.generation;
  return sum;
}

void SavedForward::Impl::check(std::string_view operation, const AttentionLayer& layer,
                               const std::shared_ptr<const char>& identity) const {
  if (identity_ != identity) {
    fail(operation, "saved",
         "got what another layer saved, expected what this layer's forward_training() saved");
  }
  if (generation_ != generation_of(layer)) {
    fail(operation, "saved",
         "got what was saved before the weights changed, expected backward() before a step or "
         "set_parameter()");
  }
}

Dims SavedForward::Impl::given_shape(const ConstTensorView& input) const {
  if (batched || input.absent()) return input.shape();
  return {input.size(1), input.size(2)};
}

const SavedForward::Impl& check_saved_call(const Operation& operation, const AttentionLayer& layer,
                                           const SavedForward& saved,
                                           const std::shared_ptr<const char>& identity,
                                           const ConstTensorView& grad_out,
                                           InputGradientOutputs& gradients) {
  check_device(operation, "layer", layer.device());
  if (saved.impl() == nullptr) {
    fail(operation, "saved", "got nothing, expected what forward_training() saved");
  }
  const SavedForward::Impl& state = *saved.impl();
  state.check(operation, layer, identity);
  const LayerInputs inputs = state.inputs();
  check_device(operation, "saved", inputs.query.device());
  check_tensor(operation, {"grad_out", grad_out}, layer.dtype(), state.given_shape(inputs.query));
  NamedView others[] = {{"grad_out", grad_out}, {"gradients.query", {}}, {"gradients.key", {}}};
  const auto check = [&](const std::string& name, const ConstTensorView& input,
                         LayerOutput& gradient, std::size_t before) {
    const std::string argument = "gradients." + name;
    if (!input.absent()) {
      const std::span<const NamedView> apart(others, before + 1);
      gradient.check(operation, argument, layer, layer.dtype(), state.given_shape(input), apart);
      return;
    }
    if (gradient.given()) {
      fail(operation, argument,
           got_shape(gradient.given_view()) + ", expected none because the call had no " + name);
    }
    gradient = LayerOutput::unwanted();
  };
  check("query", inputs.query, gradients.query, 0);
  others[1].view = gradients.query.given_view();
  check("key", inputs.key, gradients.key, 1);
  others[2].view = gradients.key.given_view();
  check("value", inputs.value, gradients.value, 2);
  return state;
}

InputShapes SavedForward::input_shapes() const {
  if (impl_ == nullptr) return {};
  const LayerInputs inputs = impl_->inputs();
  return {impl_->given_shape(inputs.query), impl_->given_shape(inputs.key),
          impl_->given_shape(inputs.value)};
}

SavedForward::SavedForward() = default;
SavedForward::~SavedForward() = default;
SavedForward::SavedForward(SavedForward&&) noexcept = default;
SavedForward& SavedForward::operator=(SavedForward&&) noexcept = default;
SavedForward::SavedForward(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}

AttentionLayer::~AttentionLayer() = default;

AttentionLayer::AttentionLayer(const AttentionLayer& other) : training_(other.training_) {
  parameters_.reserve(other.parameters_.size());
  for (const Parameter& parameter : other.parameters_) parameters_.push_back(parameter.copy());
}

AttentionLayer& AttentionLayer::operator=(const AttentionLayer& other) {
  std::vector<Parameter> copies;  // made first, so that a failure leaves this layer as it was
  copies.reserve(other.parameters_.size());
  for (const Parameter& parameter : other.parameters_) copies.push_back(parameter.copy());
  parameters_ = std::move(copies);
  training_ = other.training_;
  return *this;
}

DeviceId AttentionLayer::device() const noexcept {
  return parameters_.empty() ? DeviceId() : parameters_.front().value.device();
}

void AttentionLayer::to(const Context& context) {
  std::vector<Parameter> moved;  // all of them first, so that a failure leaves this layer as it was
  moved.reserve(parameters_.size());
  for (const Parameter& parameter : parameters_) moved.push_back(parameter.to(context));
  // In place: optimisers have the parameters' addresses.
  std::move(moved.begin(), moved.end(), parameters_.begin());
}

Tensor AttentionLayer::forward(const Context& context, const LayerInputs& inputs,
                               const LayerCall& call) const {
  LayerOutput out;
  run_forward(context, inputs, call, out, nullptr);
  return out.take();
}

void AttentionLayer::forward(const Context& context, const LayerInputs& inputs,
                             const LayerCall& call, const TensorView& out) const {
  LayerOutput given(out);
  run_forward(context, inputs, call, given, nullptr);
}

TrainingForward AttentionLayer::forward_training(const Context& context, const LayerInputs& inputs,
                                                 const LayerCall& call) const {
  LayerOutput out;
  SavedForward saved;
  run_forward(context, inputs, call, out, &saved);
  return {out.take(), std::move(saved)};
}

SavedForward AttentionLayer::forward_training(const Context& context, const LayerInputs& inputs,
                                              const LayerCall& call, const TensorView& out) const {
  LayerOutput given(out);
  SavedForward saved;
  run_forward(context, inputs, call, given, &saved);
  return saved;
}

InputGradients AttentionLayer::backward(const Context& context, const ConstTensorView& grad_out,
                                        const SavedForward& saved) {
  InputGradientOutputs gradients;
  run_backward(context, grad_out, saved, gradients);
  return gradients.take();
}

void AttentionLayer::backward(const Context& context, const ConstTensorView& grad_out,
                              const SavedForward& saved, const InputGradientViews& gradients) {
  InputGradientOutputs given(gradients);
  run_backward(context, grad_out, saved, given);
}

Tensor AttentionLayer::forward(const Context& context, const ConstTensorView& x, KvCache& cache,
                               const CachedCall& call) const {
  check_present(std::string(type_name()) + "::forward", {"x", x});
  Tensor out = Tensor::uninitialized(context, dtype(), x.shape());
  forward(context, x, cache, call, out);
  return out;
}

CachedForward AttentionLayer::forward_from(const Context& context, const ConstTensorView& x,
                                           const KvCache& past, const CachedCall& call) const {
  KvCache cache = past.fork(context);
  Tensor out = forward(context, x, cache, call);
  return {std::move(out), std::move(cache)};
}

KvCacheOptions AttentionLayer::cache_options(std::int64_t batch,
                                             std::optional<KvFormat> format) const {
  return {.batch = batch,
          .num_kv_heads = num_kv_heads(),
          .head_dim = head_dim(),
          .value_dim = value_dim(),
          .num_heads = num_heads(),
          .format = format.value_or(dtype())};
}

std::vector<Parameter*> AttentionLayer::parameters() {
  std::vector<Parameter*> pointers;
  pointers.reserve(parameters_.size());
  for (Parameter& parameter : parameters_) pointers.push_back(&parameter);
  return pointers;
}

bool AttentionLayer::has_parameter(std::string_view name) const noexcept {
  for (const Parameter& parameter : parameters_) {
    if (parameter.name == name) return true;
  }
  return false;
}

const Parameter& AttentionLayer::parameter(std::string_view name) const {
  for (const Parameter& parameter : parameters_) {
    if (parameter.name == name) return parameter;
  }
  std::string known;
  for (const Parameter& parameter : parameters_) {
    known += (known.empty() ? "" : ", ") + parameter.name;
  }
  fail(std::string(type_name()) + "::parameter", "name",
       "got \"" + std::string(name) + "\", expected one of " + known);
}

Parameter& AttentionLayer::parameter(std::string_view name) {
  return const_cast<Parameter&>(std::as_const(*this).parameter(name));
}

void AttentionLayer::set_parameter(const Context& context, std::string_view name,
                                   const ConstTensorView& value) {
  const std::string operation_name = std::string(type_name()) + "::set_parameter";
  Parameter& target = as_part_of(operation_name, [&]() -> Parameter& { return parameter(name); });
  const Operation operation(operation_name, context);
  check_device(operation, "layer", device());
  // A weight may come from the host.
  const Operation source(operation_name, value.device().is_cpu() ? DeviceId() : operation.device);
  check_strided_floats(source, {name, value}, target.value.shape());
  copy(context, value, target.value);
  ++target.generation;
}

std::int64_t AttentionLayer::parameter_count() const noexcept {
  std::int64_t count = 0;
  for (const Parameter& parameter : parameters_) count += parameter.num_elements();
  return count;
}

void AttentionLayer::zero_grad(const Context& context) {
  check_device(Operation("AttentionLayer::zero_grad", context), "layer", device());
  for (Parameter& parameter : parameters_) parameter.zero_gradient(context);
}

}  // namespace ladon
