#include "ladon/attention_layer.h"

#include <string>
#include <utility>

#include "core/checks.h"
#include "core/fail.h"
#include "layers/saved_forward.h"

namespace ladon {

SavedForward::Impl::~Impl() = default;

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

Tensor AttentionLayer::forward(const Context& context, const ConstTensorView& x, KvCache& cache,
                               const CachedCall& call) const {
  check_present(std::string(type_name()) + "::forward", {"x", x});
  Tensor out = Tensor::uninitialized(dtype(), x.shape());
  forward(context, x, cache, call, out);
  return out;
}

CachedForward AttentionLayer::forward_from(const Context& context, const ConstTensorView& x,
                                           const KvCache& past, const CachedCall& call) const {
  KvCache cache = past.fork();
  Tensor out = forward(context, x, cache, call);
  return {std::move(out), std::move(cache)};
}

KvCacheOptions AttentionLayer::cache_options(std::int64_t batch, std::optional<DType> dtype) const {
  return {.batch = batch,
          .num_kv_heads = num_kv_heads(),
          .head_dim = head_dim(),
          .value_dim = value_dim(),
          .num_heads = num_heads(),
          .dtype = dtype.value_or(this->dtype())};
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

void AttentionLayer::set_parameter(std::string_view name, const ConstTensorView& value) {
  Parameter& target = parameter(name);
  const std::string operation = std::string(type_name()) + "::set_parameter";
  check_strided_floats(operation, {name, value}, target.value.shape());
  copy(value, target.value);
}

std::int64_t AttentionLayer::parameter_count() const noexcept {
  std::int64_t count = 0;
  for (const Parameter& parameter : parameters_) count += parameter.num_elements();
  return count;
}

void AttentionLayer::zero_grad() noexcept {
  for (Parameter& parameter : parameters_) parameter.zero_gradient();
}

}  // namespace ladon
