// OutputFit: W_o by ridge regression, pulled towards the one that the converted layer has:
//   minimise |A W^T - Y|^2 + ridge |W - W_0|^2,  W = W_0 + (Y^T A - W_0 A^T A) (A^T A + ridge)^-1
// so that the error on the inputs that were added never rises, and a large ridge changes nothing.
#include <cmath>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "convert/eval_layer.h"
#include "convert/host_context.h"
#include "convert/low_rank.h"
#include "convert/matrices.h"
#include "convert/solve.h"
#include "core/checks.h"
#include "core/fail.h"
#include "ladon/convert.h"
#include "layers/latent_steps.h"
#include "layers/multi_head.h"
#include "layers/projection.h"

namespace ladon {
namespace {

constexpr std::string_view kAdd = "OutputFit::add";
constexpr std::string_view kApply = "OutputFit::apply";
// Every so many sequences one is not fitted to until a ridge is chosen by it.
constexpr std::int64_t kSetAside = 4;
// Where there are too few sequences to set one aside.
constexpr double kFewSequencesRidge = 1e-2;

using convert::RealMatrix;

bool is_latent(const AttentionLayer& layer) {
  return dynamic_cast<const LatentAttention*>(&layer) != nullptr;
}

std::string out_name(const AttentionLayer& layer) {
  return is_latent(layer) ? "o_proj" : "out_proj";
}

/// What the output projection is applied to, [tokens, heads * value_dim] in f64 on the host.
Tensor attended_rows(const Context& context, const AttentionLayer& layer,
                     const ConstTensorView& x) {
  const TrainingForward forward = layer.forward_training(context, LayerInputs{.query = x});
  const SavedForward::Impl* const saved = forward.saved.impl();
  const Tensor& attended = is_latent(layer)
                               ? static_cast<const latent::Saved*>(saved)->attended
                               : static_cast<const multi_head::Saved*>(saved)->attended;
  const std::int64_t width = layer.num_heads() * layer.value_dim();
  const ConstTensorView rows = attended.view().reshape({attended.num_elements() / width, width});
  return Tensor::copy_of(context, rows, DType::kF64).to_host();
}

/// Sums over tokens of what the layer attends to, A, and of its output without the bias, Y.
struct FitSums {
  FitSums(std::int64_t embed_dim, std::int64_t width)
      : products(DType::kF64, {width, width}), targets(DType::kF64, {embed_dim, width}) {}
  FitSums(const Context& host, const FitSums& other)
      : products(Tensor::copy_of(host, other.products)),
        targets(Tensor::copy_of(host, other.targets)),
        tokens(other.tokens) {}

  Tensor products;  // A^T A
  Tensor targets;   // Y^T A
  std::int64_t tokens = 0;
};

/// The sums as matrices, and what W_0 misses of the targets.
struct FitProblem {
  RealMatrix products, missing;  // missing: Y^T A - W_0 A^T A

  /// The change of W_0 that this ridge gives.
  RealMatrix change(const Context& host, double ridge) const {
    RealMatrix regular = products;
    convert::add_ridge(regular, ridge);
    return convert::solve_symmetric(host, std::move(regular), missing);
  }
  /// How the squared error over these tokens changes with W_0.
  double effect(const Context& host, const RealMatrix& change) const {
    return change.cwiseProduct(convert::times_transposed(host, change, products) - 2 * missing)
        .sum();
  }
};

/// The ridge whose fit to some tokens does best on others; none where each of them does harm. With
/// few tokens a small ridge fits their noise.
std::optional<double> choose_ridge(const Context& host, const FitProblem& fitted,
                                   const FitProblem& set_aside) {
  std::optional<double> best;
  double least = 0;
  for (const double ridge : {1.0, 1e-2, 1e-4, 1e-6}) {
    const double effect = set_aside.effect(host, fitted.change(host, ridge));
    if (!(effect < least)) break;  // from here on it only gets worse
    least = effect;
    best = ridge;
  }
  return best;
}

}  // namespace

class OutputFit::Impl {
 public:
  Impl(const AttentionLayer& before_layer, const AttentionLayer& after_layer)
      : before(before_layer),
        after(after_layer),
        width(after_layer.num_heads() * after_layer.value_dim()),
        fitted(after_layer.embed_dim(), width),
        set_aside(after_layer.embed_dim(), width) {}

  convert::EvalLayer before;
  convert::EvalLayer after;
  std::int64_t width;
  FitSums fitted, set_aside;
  std::int64_t sequences = 0;
};

OutputFit::OutputFit(const AttentionLayer& before, const AttentionLayer& after) {
  const bool known = dynamic_cast<const LatentAttention*>(&after) != nullptr ||
                     dynamic_cast<const MultiHeadAttention*>(&after) != nullptr;
  if (!known) {
    fail("OutputFit", "after",
         "got " + std::string(after.type_name()) +
             ", expected a MultiHeadAttention or a LatentAttention");
  }
  if (before.embed_dim() != after.embed_dim()) {
    fail("OutputFit", "after",
         "got an embed_dim of " + std::to_string(after.embed_dim()) + ", expected " +
             std::to_string(before.embed_dim()) + " as before");
  }
  impl_ = std::make_unique<Impl>(before, after);
}
OutputFit::~OutputFit() = default;
OutputFit::OutputFit(OutputFit&&) noexcept = default;
OutputFit& OutputFit::operator=(OutputFit&&) noexcept = default;

void OutputFit::add(const Context& context, const ConstTensorView& x) {
  const Operation operation(kAdd, context);
  check_device(operation, "before", impl_->before->device());
  check_device(operation, "after", impl_->after->device());
  check_device(operation, {"x", x});
  const convert::HostContext host(context);
  const Tensor output = impl_->before->forward(context, x).to_host();
  const Tensor attended = attended_rows(context, *impl_->after, x);
  const std::int64_t rows = attended.size(0);
  if (rows == 0) fail(kAdd, "x", got_shape(x) + ", expected at least one token");
  RealMatrix target =
      convert::to_matrix(host, output.view().reshape({rows, output.size(output.rank() - 1)}));
  const std::string bias = out_name(*impl_->after) + ".bias";
  if (impl_->after->has_parameter(bias)) {
    target.rowwise() -=
        convert::read_parameter(host, *impl_->after, bias).col(0).transpose().eval();
  }
  if (!target.allFinite()) fail(kAdd, "x", "got inputs whose output is not finite");
  const std::int64_t seq = x.size(x.rank() - 2);
  // Into copies, so that a failure in between leaves the sums as they were.
  FitSums fitted(host, impl_->fitted);
  FitSums set_aside(host, impl_->set_aside);
  std::int64_t sequences = impl_->sequences;
  for (std::int64_t first = 0; first < rows; first += seq, ++sequences) {
    const bool aside = sequences % kSetAside == kSetAside - 1;
    FitSums& sums = aside ? set_aside : fitted;
    const ConstTensorView a = attended.view().slice(0, first, first + seq);
    const ConstTensorView y = convert::view_of(std::as_const(target)).slice(0, first, first + seq);
    add_weight_gradient(host, a, a, sums.products, {});
    add_weight_gradient(host, a, y, sums.targets, {});
    sums.tokens += seq;
  }
  impl_->fitted = std::move(fitted);
  impl_->set_aside = std::move(set_aside);
  impl_->sequences = sequences;
}

void OutputFit::apply(const Context& context, AttentionLayer& after,
                      std::optional<double> ridge) const {
  check_device(Operation(kApply, context), "after", after.device());
  const std::string name = out_name(after) + ".weight";
  if (after.num_heads() * after.value_dim() != impl_->width ||
      after.embed_dim() != impl_->before->embed_dim()) {
    fail(kApply, "after", "got a layer of another size, expected one like that which was fitted");
  }
  if (impl_->fitted.tokens == 0) fail(kApply, "tokens", "got 0, expected add() before apply()");
  if (ridge && !(*ridge > 0 && std::isfinite(*ridge))) {
    fail(kApply, "ridge", "got " + text_of(*ridge) + ", expected a positive finite number");
  }
  const convert::HostContext host(context);
  RealMatrix weight = convert::read_parameter(host, after, name);
  const auto problem_of = [&](const FitSums& sums) {
    FitProblem problem{convert::to_matrix(host, sums.products), {}};
    problem.missing = convert::to_matrix(host, sums.targets) -
                      convert::times_transposed(host, weight, problem.products);
    return problem;
  };
  FitProblem all = problem_of(impl_->fitted);
  if (impl_->set_aside.tokens > 0) {
    const FitProblem set_aside = problem_of(impl_->set_aside);
    if (!ridge) ridge = choose_ridge(host, all, set_aside);
    if (!ridge) return;  // what is there is better than any fit
    all.products += set_aside.products;
    all.missing += set_aside.missing;
  }
  weight += all.change(host, ridge.value_or(kFewSequencesRidge));
  after.set_parameter(context, name, convert::view_of(std::as_const(weight)));
}

}  // namespace ladon
