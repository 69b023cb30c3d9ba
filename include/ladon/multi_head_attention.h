// MultiHeadAttention: MHA, GQA and MQA as one layer, for self- and cross-attention, with training.
//
//   out = W_o attention(rope(norm(W_q x)), rope(norm(W_k x)), W_v x) + b_o
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "ladon/attention_layer.h"
#include "ladon/export.h"
#include "ladon/rope.h"

namespace ladon {

/// What one q/k norm spans: a head, or all heads of a token together (OLMo 2), or a head with
/// its own weights (Cohere).
enum class QkNormSpan : std::uint8_t { kHead, kAllHeads, kEachHead };

struct MultiHeadAttentionOptions {
  std::int64_t embed_dim = 0;  // width of the query input and of the output
  std::int64_t num_heads = 0;
  std::int64_t num_kv_heads = 0;     // 0: num_heads
  std::int64_t head_dim = 0;         // 0: embed_dim / num_heads
  std::int64_t key_dim = 0;          // width of the key input; 0: embed_dim
  std::int64_t value_input_dim = 0;  // width of the value input; 0: key_dim
  bool query_bias = false;
  bool key_bias = false;
  bool value_bias = false;
  bool out_bias = false;
  bool causal = false;                // unless a call says otherwise
  std::optional<RopeOptions> rope{};  // rotary positions on queries and keys
  bool qk_norm = false;               // RMS norm of queries and keys, before rope
  double qk_norm_epsilon = 1e-6;      // positive
  QkNormSpan qk_norm_span = QkNormSpan::kHead;
  bool qk_norm_centered = false;  // layer norm instead, which subtracts the mean (Cohere)
  double qk_norm_offset = 0;      // added to the norms' weights: 1 where they store w - 1 (Gemma)
  std::optional<double> scale{};  // empty: 1 / sqrt(head_dim)
  double softcap = 0;             // 0: off
  std::optional<std::int64_t> window_left{};
  std::optional<std::int64_t> window_right{};
  /// ALiBi: -slope * distance joins each score; one slope for each query head (alibi_slopes() gives
  /// the usual ones), or none at all. Options, not parameters: nothing trains them.
  std::vector<double> alibi_slopes{};
  bool sinks = false;         // a learned sink for each query head
  double dropout = 0;         // of the weights, in training; in [0, 1)
  DType dtype = DType::kF32;  // of weights, inputs and outputs
};

/// Parameters, in this order, those that the options request:
///   q_proj.weight [num_heads * head_dim, embed_dim]          q_proj.bias
///   k_proj.weight [num_kv_heads * head_dim, key_dim]         k_proj.bias
///   v_proj.weight [num_kv_heads * head_dim, value_input_dim] v_proj.bias
///   out_proj.weight [embed_dim, num_heads * head_dim]        out_proj.bias
///   q_norm.weight [head_dim]   k_norm.weight [head_dim]   sinks [num_heads]
/// Norms over all heads are [num_heads * head_dim] and [num_kv_heads * head_dim], those of each
/// head [num_heads, head_dim] and [num_kv_heads, head_dim].
class LADON_API MultiHeadAttention final : public AttentionLayer {
 public:
  /// Xavier-uniform weights from the seed (the same everywhere), zero biases and sinks, unit norms.
  /// Throws Error for options that do not fit.
  explicit MultiHeadAttention(const MultiHeadAttentionOptions& options, std::uint64_t seed = 0);
  ~MultiHeadAttention() override;
  /// A copy has its own weights and gradients, and cannot use what another layer saved.
  MultiHeadAttention(const MultiHeadAttention& other);
  MultiHeadAttention& operator=(const MultiHeadAttention& other);
  MultiHeadAttention(MultiHeadAttention&&) noexcept;
  MultiHeadAttention& operator=(MultiHeadAttention&&) noexcept;

  /// Zero weights, unit norms: for weights that are set next. Skips random initialisation.
  static MultiHeadAttention zeros(const MultiHeadAttentionOptions& options);
  static MultiHeadAttention mha(std::int64_t embed_dim, std::int64_t num_heads,
                                std::uint64_t seed = 0);
  static MultiHeadAttention mqa(std::int64_t embed_dim, std::int64_t num_heads,
                                std::uint64_t seed = 0);
  static MultiHeadAttention gqa(std::int64_t embed_dim, std::int64_t num_heads,
                                std::int64_t num_kv_heads, std::uint64_t seed = 0);

  /// One KV head per query head; one for all; or something between. With one head of each a layer
  /// is MHA and MQA at once.
  bool is_mha() const noexcept { return options_.num_kv_heads == options_.num_heads; }
  bool is_mqa() const noexcept { return options_.num_kv_heads == 1; }
  bool is_gqa() const noexcept { return !is_mha() && !is_mqa(); }

  /// With every default filled in.
  const MultiHeadAttentionOptions& options() const noexcept { return options_; }

  std::string_view type_name() const noexcept override { return "MultiHeadAttention"; }
  std::int64_t embed_dim() const noexcept override { return options_.embed_dim; }
  std::int64_t num_heads() const noexcept override { return options_.num_heads; }
  std::int64_t num_kv_heads() const noexcept override { return options_.num_kv_heads; }
  std::int64_t head_dim() const noexcept override { return options_.head_dim; }
  std::int64_t value_dim() const noexcept override { return options_.head_dim; }
  std::int64_t key_dim() const noexcept { return options_.key_dim; }
  std::int64_t value_input_dim() const noexcept { return options_.value_input_dim; }
  DType dtype() const noexcept override { return options_.dtype; }
  void to(const Context& context) override;

  using AttentionLayer::forward;
  void forward(const Context& context, const ConstTensorView& x, KvCache& cache,
               const CachedCall& call, const TensorView& out) const override;

  class Plan;
  /// For the library's own use.
  const Plan& plan() const noexcept { return *plan_; }
  ConstTensorView alibi_slopes() const noexcept { return alibi_slopes_; }

 private:
  MultiHeadAttention(const MultiHeadAttentionOptions& options, std::optional<std::uint64_t> seed);
  void run_forward(const Context& context, const LayerInputs& inputs, const LayerCall& call,
                   LayerOutput& out, SavedForward* saved) const override;
  void run_backward(const Context& context, const ConstTensorView& grad_out,
                    const SavedForward& saved, InputGradientOutputs& gradients) override;

  MultiHeadAttentionOptions options_;
  Tensor alibi_slopes_;               // where the weights are; absent where there are none
  std::shared_ptr<const Plan> plan_;  // copies share it
  // Tells this layer's saved states from others'. Its address is the name; nothing is in it.
  std::shared_ptr<const char> identity_;
};

}  // namespace ladon
