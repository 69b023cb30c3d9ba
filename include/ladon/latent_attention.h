// LatentAttention: multi-head latent attention (MLA), as in DeepSeek-V2 and V3.
//
// A token is kept as one short vector, its latent c, and one rope key that all heads share:
//   c = norm(W_dkv x), k_rope = rope(W_kr x)                            what the cache holds
//   k_h = [W_uk,h c | k_rope], v_h = W_uv,h c, q_h = [q_nope | rope(q_rope)]
//   out = W_o [attention(q_h, k_h, v_h)]_h
// Two forms give the same answer. Expanded makes k_h and v_h of every token. Absorbed moves W_uk to
// the query and W_uv behind the attention, so that latents are keys and values at once:
//   q_h . k_h = [W_uk,h^T q_nope | q_rope] . [c | k_rope],  sum(p v_h) = W_uv,h sum(p c)
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "ladon/attention_layer.h"
#include "ladon/export.h"
#include "ladon/rope.h"

namespace ladon {

enum class LatentForm : std::uint8_t {
  kAuto,  // whichever costs less for a sequence's own lengths
  kExpanded,
  kAbsorbed,
};

struct LADON_API LatentAttentionOptions {
  std::int64_t embed_dim = 0;
  std::int64_t num_heads = 0;
  std::int64_t query_rank = 0;  // 0: queries are projected directly
  std::int64_t kv_rank = 0;     // of the latent
  std::int64_t nope_dim = 0;    // elements of a head's query and key without rope; 0: none
  std::int64_t rope_dim = 0;    // with rope; even, 0: none
  std::int64_t value_dim = 0;   // 0: nope_dim, or rope_dim where that is 0
  bool query_bias = false;      // of q_proj, or of q_a_proj
  bool kv_bias = false;         // of kv_a_proj_with_mqa
  bool out_bias = false;
  bool query_norm = true;  // RMS norm of the query's latent, where there is one
  bool kv_norm = true;     // RMS norm of the latent
  double norm_epsilon = 1e-6;
  bool causal = false;  // unless a call says otherwise
  /// rotary_dim must be left at 0: rope_dim says it.
  RopeOptions rope{.layout = RopeLayout::kInterleaved};
  /// Empty: 1 / sqrt(nope_dim + rope_dim), times yarn_mscale(factor, mscale_all_dim)^2 where YaRN
  /// has an mscale_all_dim.
  std::optional<double> scale{};
  double dropout = 0;  // of the weights, in training; in [0, 1)
  LatentForm form = LatentForm::kAuto;
  DType dtype = DType::kF32;

  /// Throws Error for what no layer can have: a dimension of 0 (or negative), an odd rope_dim, a
  /// latent as large as the keys and values that it stands for, and numbers out of range.
  void validate() const;
};

/// Parameters, in this order, those that the options request; names are DeepSeek's:
///   q_a_proj.weight [query_rank, embed_dim]   q_a_proj.bias   q_a_layernorm.weight [query_rank]
///   q_b_proj.weight [num_heads * (nope_dim + rope_dim), query_rank]
///     or, without a query rank, q_proj.weight [.., embed_dim]   q_proj.bias
///   kv_a_proj_with_mqa.weight [kv_rank + rope_dim, embed_dim]   kv_a_proj_with_mqa.bias
///   kv_a_layernorm.weight [kv_rank]
///   kv_b_proj.weight [num_heads * (nope_dim + value_dim), kv_rank]
///   o_proj.weight [embed_dim, num_heads * value_dim]   o_proj.bias
/// Calls may give a separate key input, which the latents then come from; a value input throws,
/// because values come from the latents too.
class LADON_API LatentAttention final : public AttentionLayer {
 public:
  /// Xavier-uniform weights from the seed (the same everywhere), zero biases, unit norms.
  explicit LatentAttention(const LatentAttentionOptions& options, std::uint64_t seed = 0);
  ~LatentAttention() override;
  /// A copy has its own weights and gradients, and cannot use what another layer saved.
  LatentAttention(const LatentAttention& other);
  LatentAttention& operator=(const LatentAttention& other);
  LatentAttention(LatentAttention&&) noexcept;
  LatentAttention& operator=(LatentAttention&&) noexcept;

  /// Zero weights, unit norms: for weights that are set next. Skips random initialisation.
  static LatentAttention zeros(const LatentAttentionOptions& options);

  /// With every default filled in, scale included.
  const LatentAttentionOptions& options() const noexcept { return options_; }
  void set_form(LatentForm form) noexcept { options_.form = form; }
  /// The form that `query_len` new tokens of a sequence of kv_len take: the one that was set, or
  /// the one with fewer multiplications. It depends on that sequence alone.
  LatentForm form_for(std::int64_t query_len, std::int64_t kv_len) const noexcept;

  std::string_view type_name() const noexcept override { return "LatentAttention"; }
  std::int64_t embed_dim() const noexcept override { return options_.embed_dim; }
  std::int64_t num_heads() const noexcept override { return options_.num_heads; }
  /// Every head has its own keys and values; the cache has one head for all.
  std::int64_t num_kv_heads() const noexcept override { return options_.num_heads; }
  /// Of a query and an expanded key: nope_dim + rope_dim.
  std::int64_t head_dim() const noexcept override { return options_.nope_dim + options_.rope_dim; }
  std::int64_t value_dim() const noexcept override { return options_.value_dim; }
  std::int64_t kv_rank() const noexcept { return options_.kv_rank; }
  std::int64_t query_rank() const noexcept { return options_.query_rank; }
  std::int64_t nope_dim() const noexcept { return options_.nope_dim; }
  std::int64_t rope_dim() const noexcept { return options_.rope_dim; }
  /// Elements that the cache holds for a token: kv_rank + rope_dim.
  std::int64_t latent_dim() const noexcept { return options_.kv_rank + options_.rope_dim; }
  DType dtype() const noexcept override { return options_.dtype; }
  /// Its account of multi-head attention (KvCache::mha_elements, reduction) counts the keys and
  /// values that latents replace: num_heads * (nope_dim + value_dim) a token. Set mha_dim to 2 *
  /// head_dim() to count keys and values with rope, as papers on MLA do.
  KvCacheOptions cache_options(std::int64_t batch = 1,
                               std::optional<KvFormat> format = {}) const override;

  using AttentionLayer::forward;
  void forward(const Context& context, const ConstTensorView& x, KvCache& cache,
               const CachedCall& call, const TensorView& out) const override;

  /// The steps, for those who want to look. x [batch, seq, embed_dim] to latents [batch, seq,
  /// latent_dim], after norm and rope: c, then the rope key.
  Tensor compress(const Context& context, const ConstTensorView& x,
                  const RopePositions& positions = {}) const;
  /// Latents to keys [batch, seq, num_heads, nope_dim + rope_dim] and values [batch, seq,
  /// num_heads, value_dim].
  Tensor expand_keys(const Context& context, const ConstTensorView& latents) const;
  Tensor expand_values(const Context& context, const ConstTensorView& latents) const;

  class Plan;
  /// For the library's own use.
  const Plan& plan() const noexcept { return *plan_; }

 private:
  friend class LatentContextAccess;

  LatentAttention(const LatentAttentionOptions& options, std::optional<std::uint64_t> seed);
  void run_forward(const Context& context, const LayerInputs& inputs, const LayerCall& call,
                   LayerOutput& out, SavedForward* saved) const override;
  void run_backward(const Context& context, const ConstTensorView& grad_out,
                    const SavedForward& saved, InputGradientOutputs& gradients) override;

  LatentAttentionOptions options_;
  std::shared_ptr<const Plan> plan_;      // copies share it
  std::shared_ptr<const char> identity_;  // as in MultiHeadAttention
};

}  // namespace ladon
