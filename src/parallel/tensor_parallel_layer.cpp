// TensorParallelLayer: weights in slices, clipping, and what the calls of ranks agree on.

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "core/checks.h"
#include "core/context_impl.h"
#include "core/fail.h"
#include "ladon/optim.h"
#include "layers/layer_weights.h"
#include "parallel/host_messages.h"
#include "parallel/tensor_parallel.h"

namespace ladon {

TensorParallelLayer::TensorParallelLayer(Communicator& communicator)
    : communicator_(communicator) {}

Parameter& TensorParallelLayer::add_parameter(const std::string& name, DType dtype,
                                              const Dims& whole, std::int64_t parts) {
  cuts_.push_back({.whole_rows = whole[0], .parts = static_cast<int>(parts)});
  parameters_.push_back({.name = name});
  Dims own = whole;
  own[0] = slice_of(name, communicator_.rank()).rows;
  return parameters_.back() = Parameter::zeros_without_gradient(name, dtype, own);
}

TensorParallelLayer::Slice TensorParallelLayer::slice_of(std::string_view name, int rank) const {
  static_cast<void>(parameter(name));  // throws where there is none
  const Cut& cut = cuts_[static_cast<std::size_t>(index_of(parameters_, name))];
  const int replicas = communicator_.size() / cut.parts;
  const int part = rank / replicas;
  const Range rows = share_of(cut.whole_rows, part, cut.parts);
  return {.whole_rows = cut.whole_rows,
          .first = rows.begin,
          .rows = rows.length(),
          .first_rank = part * replicas,
          .end_rank = (part + 1) * replicas};
}

void TensorParallelLayer::set_whole_parameter(const Context& context, std::string_view name,
                                              const ConstTensorView& whole) {
  const Slice slice = slice_of(name, communicator_.rank());
  Dims expected = parameter(name).value.shape();
  expected[0] = slice.whole_rows;
  if (!(whole.shape() == expected)) {
    fail(std::string(type_name()) + "::set_whole_parameter", name,
         got_shape(whole) + ", expected the whole's " + expected.to_string());
  }
  set_parameter(context, name, whole.slice(0, slice.first, slice.first + slice.rows));
}

void TensorParallelLayer::set_whole_parameters(const Context& context,
                                               const AttentionLayer& whole) {
  for (const Parameter& own : named_parameters()) {
    set_whole_parameter(context, own.name, whole.parameter(own.name).value);
  }
}

Tensor TensorParallelLayer::whole_parameter(const Context& context, std::string_view name) const {
  const std::string label = std::string(type_name()) + "::whole_parameter";
  const Operation operation(label, context);
  Tensor whole;
  run_collective(
      communicator_, operation,
      [&](CallSignature& signature) {
        check_device(operation, "layer", device());
        static_cast<void>(parameter(name));
        describe(context, signature);
        signature.add("name", name);
      },
      [&](CollectiveCall& call) {
        whole = gather_rows(context, call, *this, name, parameter(name).value);
      },
      [] {});
  return whole;
}

double TensorParallelLayer::clip_gradients(const Context& context, double max_norm) {
  const std::string label = std::string(type_name()) + "::clip_gradients";
  const Operation operation(label, context);
  double own_norm = 0;
  double norm = 0;
  run_collective(
      communicator_, operation,
      [&](CallSignature& signature) {
        std::vector<Parameter*> counted;
        for (Parameter& parameter : parameters_) {
          if (slice_of(parameter.name, communicator_.rank()).first_rank == communicator_.rank()) {
            counted.push_back(&parameter);
          }
        }
        if (!(max_norm > 0)) {
          fail(operation, "max_norm", "got " + text_of(max_norm) + ", expected a positive number");
        }
        constexpr double kNormAlone = std::numeric_limits<double>::infinity();
        own_norm = ladon::clip_gradients(context, counted, kNormAlone);
        describe(context, signature);
        signature.add("max_norm", max_norm);
      },
      [&](CollectiveCall& call) {
        std::vector<double> norms(static_cast<std::size_t>(call.size()));
        gather_bytes(call, std::as_bytes(std::span(&own_norm, 1)), [&](int other) {
          return std::as_writable_bytes(std::span(&norms[static_cast<std::size_t>(other)], 1));
        });
        for (const double part : norms) norm = std::hypot(norm, part);
      },
      [&] {
        if (!std::isfinite(norm) || norm <= max_norm) return;
        for (Parameter& parameter : parameters_) {
          Tensor& gradient = parameter.gradient;
          backend_of(context).scale({gradient.data(), gradient.dtype(), gradient.num_elements()},
                                    max_norm / norm);
        }
      });
  return norm;
}

void TensorParallelLayer::describe(const Context& context, CallSignature& signature) const {
  signature.add("isa", name_of(context.isa()));
  signature.add("layer", type_name());
  signature.add("dtype", name_of(dtype()));
  signature.add("training", std::int64_t{is_training()});
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Dims whole = parameters_[i].value.shape();
    whole[0] = cuts_[i].whole_rows;
    signature.add(parameters_[i].name, whole.to_string());
  }
  signature.add_lines(description_);
}

void describe_rope(CallSignature& signature, const RopeOptions& rope, std::int64_t head_dim) {
  signature.add("rope.layout", static_cast<std::int64_t>(rope.layout));
  signature.add("rope.base", rope.base);
  signature.add("rope.scaling", static_cast<std::int64_t>(rope.scaling.kind));
  signature.add("rope.magnitude", rope_magnitude(rope));
  signature.add("rope.frequencies", rope_frequencies(rope, head_dim));
}

void sum_shared_gradients(const Context& context, CollectiveCall& call,
                          const TensorParallelLayer& layer, PendingGradients& pending) {
  const std::span<const Parameter> parameters = layer.named_parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const TensorParallelLayer::Slice slice = layer.slice_of(parameters[i].name, call.rank());
    sum_over_ranks(context, call, pending.of(static_cast<int>(i)), slice.first_rank,
                   slice.end_rank);
  }
}

Tensor gather_rows(const Context& context, CollectiveCall& call, const TensorParallelLayer& layer,
                   std::string_view name, const Tensor& own, int receiver) {
  const auto receives = [&](int rank) { return receiver == kEveryRank || receiver == rank; };
  const TensorParallelLayer::Slice sent = layer.slice_of(name, call.rank());
  Tensor whole;
  if (receives(call.rank())) {
    Dims shape = own.shape();
    shape[0] = sent.whole_rows;
    whole = Tensor::uninitialized(own.dtype(), shape);
  }
  const Tensor mine = on_host(context, own);
  // The first rank that has some rows sends them.
  exchange_bytes(
      call,
      [&](int other) {
        return sent.first_rank == call.rank() && receives(other) ? host_bytes(mine)
                                                                 : std::span<const std::byte>();
      },
      [&](int other) {
        const TensorParallelLayer::Slice slice = layer.slice_of(name, other);
        if (slice.first_rank != other || !receives(call.rank())) return std::span<std::byte>();
        return host_bytes(whole.view().slice(0, slice.first, slice.first + slice.rows));
      });
  return whole;
}

}  // namespace ladon
