// Backward of MultiHeadAttention.

#include <cstddef>
#include <string>

#include "core/checks.h"
#include "core/element.h"
#include "core/fail.h"
#include "layers/multi_head.h"
#include "layers/norm.h"
#include "layers/pending_gradients.h"
#include "layers/projection.h"

namespace ladon {

using namespace multi_head;

namespace {

constexpr std::string_view kOperation = "MultiHeadAttention::backward";

/// The reverse of giving each query head its KV head's value: sums over the heads of each group.
Tensor gather_values(const Tensor& dattended, std::int64_t num_kv_heads) {
  const std::int64_t num_heads = dattended.size(2);
  const std::int64_t group = num_heads / num_kv_heads;
  const std::int64_t dim = dattended.size(3);
  Tensor dv = Tensor::uninitialized(dattended.dtype(),
                                    {dattended.size(0), dattended.size(1), num_kv_heads, dim});
  for (std::int64_t i = 0; i < dv.num_elements(); ++i) {
    const std::int64_t first = i / dim * group * dim + i % dim;
    double sum = 0;
    for (std::int64_t g = 0; g < group; ++g) {
      sum += load_element(dattended.data(), dattended.dtype(), first + g * dim);
    }
    store_element(dv.data(), dv.dtype(), i, sum);
  }
  return dv;
}

/// Backward, from the output's gradient to the inputs'.
class BackwardPass {
 public:
  BackwardPass(const Context& context, MultiHeadAttention& layer, const Saved& saved)
      : context_(context), layer_(layer), saved_(saved), pass_(context, layer), pending_(layer) {
    dquery_ = sum_for(saved.query);
    if (!saved.self) dkey_ = sum_for(saved.key);
    if (saved.own_value) dvalue_ = sum_for(saved.value);
  }

  InputGradients run(const ConstTensorView& grad_out) {
    const InputRows dout(grad_out);
    Tensor dattended = Tensor::uninitialized(layer_.dtype(), saved_.attended.shape());
    {
      Tensor sums(sum_dtype(), saved_.attended.shape());
      add_input_gradient(context_, dout.view(), pass_.weight("out_proj.weight"), merged(sums));
      copy(sums, dattended);
    }
    add_weight_gradient(context_, merged(saved_.attended), dout.view(),
                        pending_.of("out_proj.weight"), pending_.of("out_proj.bias"));
    if (saved_.one_position) {
      project_back(gather_values(dattended, layer_.num_kv_heads()), "v_proj", saved_.value_input(),
                   value_sum());
    } else {
      attention_back(dattended);
    }
    InputGradients gradients;
    gradients.query = finished(dquery_);
    if (!saved_.self) gradients.key = finished(dkey_);
    if (saved_.own_value) gradients.value = finished(dvalue_);
    pending_.commit();
    return gradients;
  }

 private:
  DType sum_dtype() const { return layer_.dtype() == DType::kF64 ? DType::kF64 : DType::kF32; }
  Tensor sum_for(const Tensor& input) const { return Tensor(sum_dtype(), input.shape()); }
  Tensor& key_sum() { return saved_.self ? dquery_ : dkey_; }
  Tensor& value_sum() { return saved_.own_value ? dvalue_ : key_sum(); }

  /// An input's gradient in the layer's dtype, without a batch where the input had none.
  Tensor finished(const Tensor& sum) const {
    if (saved_.batched) return Tensor::copy_of(sum, layer_.dtype());
    return Tensor::copy_of(sum.view().select(0, 0), layer_.dtype());
  }

  void project_back(const Tensor& dy, const std::string& name, const ConstTensorView& x,
                    Tensor& dx) {
    add_input_gradient(context_, merged(dy), pass_.weight(name + ".weight"), rows_of(dx));
    add_weight_gradient(context_, InputRows(x).view(), merged(dy), pending_.of(name + ".weight"),
                        pending_.of(name + ".bias"));
  }

  /// Back through rope and norm, in place. The norm's input is projected once more, not kept.
  void unplace(Tensor& dheads, const std::string& projection, const std::string& norm,
               const ConstTensorView& x, const RopePositions& positions) {
    const MultiHeadAttentionOptions& options = layer_.options();
    if (options.rope.has_value()) {
      rope_backward(context_, dheads, *options.rope, positions, dheads);
    }
    if (!options.qk_norm) return;
    const Tensor heads = pass_.project_heads(x, projection, dheads.size(2));
    rms_norm_backward(context_, heads, pass_.weight(norm), options.qk_norm_epsilon, dheads, dheads,
                      pending_.of(norm));
  }

  void attention_back(const Tensor& dattended) {
    AttentionOptions options = saved_.options;
    // The layer's own once more: it may have moved since.
    options.alibi_slopes = pass_.alibi_slopes();
    if (layer_.options().sinks) options.sinks = pass_.weight("sinks");
    Tensor dq = Tensor::uninitialized(layer_.dtype(), saved_.q.shape());
    Tensor dk = Tensor::uninitialized(layer_.dtype(), saved_.k.shape());
    Tensor dv = Tensor::uninitialized(layer_.dtype(), saved_.v.shape());
    AttentionGradients gradients{.dq = dq, .dk = dk, .dv = dv};
    // Written, not added: what is pending was 0 until now.
    if (layer_.options().sinks) gradients.dsinks = pending_.of("sinks");
    attention_backward(context_, saved_.q, saved_.k, saved_.v, options,
                       {.out = saved_.attended, .lse = saved_.lse, .dout = dattended}, gradients);
    unplace(dq, "q_proj", "q_norm.weight", saved_.query, saved_.query_positions);
    unplace(dk, "k_proj", "k_norm.weight", saved_.key_input(), saved_.key_positions);
    project_back(dq, "q_proj", saved_.query, dquery_);
    project_back(dk, "k_proj", saved_.key_input(), key_sum());
    project_back(dv, "v_proj", saved_.value_input(), value_sum());
  }

  const Context& context_;
  MultiHeadAttention& layer_;
  const Saved& saved_;
  Pass pass_;
  PendingGradients pending_;
  Tensor dquery_, dkey_, dvalue_;
};

}  // namespace

InputGradients MultiHeadAttention::backward(const Context& context, const ConstTensorView& grad_out,
                                            const SavedForward& saved) {
  const auto& state = static_cast<const Saved&>(check_saved(kOperation, saved, identity_));
  const std::int64_t batch = state.query.size(0);
  const std::int64_t length = state.query.size(1);
  check_tensor(
      kOperation, {"grad_out", grad_out}, options_.dtype,
      state.batched ? Dims{batch, length, options_.embed_dim} : Dims{length, options_.embed_dim});
  return BackwardPass(context, *this, state).run(with_batch(grad_out));
}

}  // namespace ladon
