// OutputFit: W_o by ridge regression, pulled towards the one that the converted layer has:
//   minimise |A W^T - Y|^2 + ridge |W - W_0|^2,  W = W_0 + (Y^T A - W_0 A^T A) (A^T A + ridge)^-1
// so that the error on the inputs that were added never rises, and a large ridge changes nothing.
#include <cmath>
#include <string>
#include <string_view>
#include <utility>

#include "convert/eval_layer.h"
#include "convert/host_context.h"
#include "convert/low_rank.h"
#include "convert/matrices.h"
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

std::string out_name(const AttentionLayer& layer) {
  return dynamic_cast<const LatentAttention*>(&layer) != nullptr ? "o_proj" : "out_proj";
}

/// What the output projection is applied to, [tokens, heads * value_dim] in f64 on the host.
Tensor attended_rows(const Context& context, const AttentionLayer& layer,
                     const ConstTensorView& x) {
  const TrainingForward forward = layer.forward_training(context, LayerInputs{.query = x});
  const SavedForward::Impl* const saved = forward.saved.impl();
  const auto* const latent = dynamic_cast<const latent::Saved*>(saved);
  const Tensor& attended =
      latent != nullptr ? latent->attended : static_cast<const multi_head::Saved*>(saved)->attended;
  const std::int64_t width = layer.num_heads() * layer.value_dim();
  const ConstTensorView rows = attended.view().reshape({attended.num_elements() / width, width});
  return Tensor::copy_of(context, rows, DType::kF64).to_host();
}

}  // namespace

class OutputFit::Impl {
 public:
  Impl(const AttentionLayer& before_layer, const AttentionLayer& after_layer)
      : before(before_layer),
        after(after_layer),
        width(after_layer.num_heads() * after_layer.value_dim()),
        products(DType::kF64, {width, width}),
        targets(DType::kF64, {after_layer.embed_dim(), width}) {}

  convert::EvalLayer before;
  convert::EvalLayer after;
  std::int64_t width;
  Tensor products;  // A^T A
  Tensor targets;   // (Y - b)^T A
  std::int64_t tokens = 0;
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
  const convert::HostContext host(context);
  const Tensor output = impl_->before->forward(context, x).to_host();
  const Tensor attended = attended_rows(context, *impl_->after, x);
  if (attended.size(0) == 0) fail(kAdd, "x", got_shape(x) + ", expected at least one token");
  convert::RealMatrix target = convert::to_matrix(
      host, output.view().reshape({attended.size(0), output.size(output.rank() - 1)}));
  const std::string bias = out_name(*impl_->after) + ".bias";
  if (impl_->after->has_parameter(bias)) {
    target.rowwise() -=
        convert::read_parameter(host, *impl_->after, bias).col(0).transpose().eval();
  }
  if (!target.allFinite()) fail(kAdd, "x", "got inputs whose output is not finite");
  add_weight_gradient(host, attended, attended, impl_->products, {});
  add_weight_gradient(host, attended, convert::view_of(std::as_const(target)), impl_->targets, {});
  impl_->tokens += attended.size(0);
}

void OutputFit::apply(const Context& context, AttentionLayer& after, double ridge) const {
  using convert::RealMatrix;
  const std::string name = out_name(after) + ".weight";
  if (after.num_heads() * after.value_dim() != impl_->width ||
      after.embed_dim() != impl_->before->embed_dim()) {
    fail(kApply, "after", "got a layer of another size, expected one like that which was fitted");
  }
  if (impl_->tokens == 0) fail(kApply, "tokens", "got 0, expected add() before apply()");
  if (!(ridge > 0) || !std::isfinite(ridge)) {
    fail(kApply, "ridge", "got " + text_of(ridge) + ", expected a positive finite number");
  }
  const convert::HostContext host(context);
  RealMatrix products = convert::to_matrix(host, impl_->products);
  RealMatrix weight = convert::read_parameter(host, after, name);
  const RealMatrix missing =
      convert::to_matrix(host, impl_->targets) - convert::times_transposed(host, weight, products);
  convert::add_ridge(products, ridge);
  const ladon_eigen::LLT<RealMatrix> solver(products);
  weight += solver.solve(missing.transpose()).transpose();
  after.set_parameter(context, name, convert::view_of(std::as_const(weight)));
}

}  // namespace ladon
