// The steps of LatentAttention, on rows of tokens; forward, backward and cached calls are made of
// them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/checks.h"
#include "core/compute_dtype.h"
#include "ladon/attention.h"
#include "ladon/latent_attention.h"
#include "layers/layer_weights.h"
#include "layers/rope_internal.h"
#include "layers/rows.h"
#include "layers/saved_forward.h"

namespace ladon {

/// What a layer works out once, from its options and the names of its parameters.
class LatentAttention::Plan {
 public:
  Plan(const LatentAttentionOptions& options, std::span<const Parameter> parameters);

  LinearIndex query;      // q_proj, or q_b_proj behind the queries' latents
  LinearIndex query_low;  // q_a_proj
  LinearIndex latents;    // kv_a_proj_with_mqa
  LinearIndex out;
  int query_norm = kNoParameter;
  int latent_norm = kNoParameter;
  int kv_b = kNoParameter;
  rope_internal::RopePlan rope;
};

namespace latent {

/// The heads that a layer has here, which are all of them or, where ranks share a layer, a part.
struct LatentHeads {
  LatentHeads(const LatentAttention& all)  // NOLINT: a whole layer is all of its heads
      : layer(all),
        options(all.options()),
        plan(all.plan()),
        whole_heads(all.options().num_heads) {}
  LatentHeads(const AttentionLayer& of, const LatentAttentionOptions& own,
              const LatentAttention::Plan& indices, std::int64_t first, std::int64_t whole)
      : layer(of), options(own), plan(indices), first_head(first), whole_heads(whole) {}

  std::int64_t num_heads() const { return options.num_heads; }
  std::int64_t head_dim() const { return options.nope_dim + options.rope_dim; }
  std::int64_t value_dim() const { return options.value_dim; }
  std::int64_t kv_rank() const { return options.kv_rank; }
  std::int64_t query_rank() const { return options.query_rank; }
  std::int64_t latent_dim() const { return options.kv_rank + options.rope_dim; }
  DType dtype() const { return options.dtype; }
  /// As LatentAttention::form_for(): a matter of one head.
  LatentForm form_for(std::int64_t query_len, std::int64_t kv_len) const noexcept;

  const AttentionLayer& layer;
  const LatentAttentionOptions& options;  // with the number of heads that are here
  const LatentAttention::Plan& plan;
  std::int64_t first_head = 0;
  std::int64_t whole_heads = 0;  // of the whole layer
};

/// Checks a layer's options, and fills in the defaults. Throws Error.
LatentAttentionOptions complete_options(LatentAttentionOptions options);

/// What a cache for a layer with these (complete) options holds.
KvCacheOptions cache_options(const LatentAttentionOptions& options, std::int64_t batch,
                             std::optional<KvFormat> format);

/// The parameters of a layer with these (complete) options, in its order.
struct ParameterPlan {
  std::string name;
  Dims shape;
};
std::vector<ParameterPlan> plan_parameters(const LatentAttentionOptions& options);

/// Columns [begin, end) of every head of rows [batch * seq, heads * dim], as [batch, seq, heads,
/// end - begin]; one sequence of all rows where seq is 0.
template <class View>
View head_columns(const View& rows, std::int64_t seq, std::int64_t heads, std::int64_t begin,
                  std::int64_t end);

/// [batch, seq, dim] as [batch, seq, 1, dim].
ConstTensorView one_head(const Tensor& latents);

class Steps {
 public:
  Steps(const Context& context, const LatentHeads& heads)
      : context_(context), heads_(heads), options_(heads.options), plan_(heads.plan) {}

  ConstTensorView weight(int index) const { return weight_of(heads_.layer, index); }
  bool low_rank() const { return options_.query_rank != 0; }
  /// In which absorbed queries are summed: f64 for f64 layers, else f32.
  DType compute_dtype() const { return ladon::compute_dtype(options_.dtype); }
  /// In which they are multiplied with latents that are stored as `stored`, and outputs are kept:
  /// bf16 layers round them, as they do all that enters a product, so that bf16 arithmetic can be
  /// used where the machine has it.
  DType absorbed_dtype(DType stored) const {
    const bool all_bf16 = options_.dtype == DType::kBF16 && stored == DType::kBF16;
    return all_bf16 ? DType::kBF16 : compute_dtype();
  }
  AttentionOptions attention_options(std::optional<bool> causal) const;

  /// x to the queries' latents, where there are such, without their norm.
  void project_low(const ConstTensorView& x, const TensorView& low) const;
  void norm_low(const ConstTensorView& from, const TensorView& to) const;
  /// Queries, from normed latents or else from x: [rows, heads * (nope + rope)].
  void project_queries(const ConstTensorView& input, const TensorView& queries) const;
  /// Both in place; `seq` as in head_columns().
  void rotate_queries(const TensorView& queries, std::int64_t seq, const RopePositions& positions,
                      bool backward = false) const;
  void rotate_latents(const TensorView& latents, std::int64_t seq, const RopePositions& positions,
                      bool backward = false) const;

  /// x to [latent | rope key], without norm and rope.
  void project_latents(const ConstTensorView& x, const TensorView& latents) const;
  /// The first kv_rank columns; does nothing but copy them where the layer has no norm.
  void norm_latents(const ConstTensorView& from, const TensorView& to) const;

  /// Finished latents to [rows, heads * (nope + rope)] and [rows, heads * value].
  void expand_keys(const ConstTensorView& latents, const TensorView& keys) const {
    expand_keys(latents, 0, options_.num_heads, keys);
  }
  void expand_values(const ConstTensorView& latents, const TensorView& values) const {
    expand_values(latents, 0, options_.num_heads, values);
  }
  /// The same for some heads.
  void expand_keys(const ConstTensorView& latents, std::int64_t first_head, std::int64_t heads,
                   const TensorView& keys) const;
  void expand_values(const ConstTensorView& latents, std::int64_t first_head, std::int64_t heads,
                     const TensorView& values) const;

  /// Queries to [rows, heads * (kv_rank + rope)]: their product with a latent is that of the query
  /// with its key.
  void absorb_queries(const ConstTensorView& queries, const TensorView& absorbed) const;
  /// Weighted sums of latents, [rows, heads * kv_rank], to those of values, [rows, heads * value].
  void apply_values(const ConstTensorView& sums, const TensorView& attended) const;
  void project_out(const ConstTensorView& attended, const TensorView& out) const;

  /// Rows of kv_b_proj.weight that make the keys, or the values, of one head.
  TensorView key_rows(const TensorView& kv_b, std::int64_t head) const;
  ConstTensorView key_rows(const ConstTensorView& kv_b, std::int64_t head) const;
  TensorView value_rows(const TensorView& kv_b, std::int64_t head) const;
  ConstTensorView value_rows(const ConstTensorView& kv_b, std::int64_t head) const;

 private:
  std::int64_t kv_b_step() const {
    return (options_.nope_dim + options_.value_dim) * options_.kv_rank;
  }

  const Context& context_;
  const LatentHeads heads_;
  const LatentAttentionOptions& options_;
  const LatentAttention::Plan& plan_;
};

/// What a call of forward_training() leaves for backward.
class Saved : public SavedForward::Impl {
 public:
  using Impl::Impl;

  LayerInputs inputs() const override { return {x, key, {}}; }
  const Tensor& key_input() const { return self ? x : key; }

  bool self = true;              // keys come from x
  Tensor x;                      // [batch, seq, embed]: the queries' input
  Tensor key;                    // the keys', where it is another
  Tensor low, normed_low;        // the queries' latents before and after their norm
  Tensor compressed, latents;    // [latent | rope key] before and after norm and rope
  Tensor queries, keys, values;  // [batch, seq, heads, dim]
  Tensor attended, lse;
};

/// The inputs of a call, [batch, seq, embed_dim] each; keys, and values with them, come from `key`.
struct CheckedInputs {
  ConstTensorView query;
  ConstTensorView key;
  bool self = true;  // key is query
};

/// All that can be refused, before anything is computed. `options` are the whole layer's.
CheckedInputs check_call(const Operation& operation, const AttentionLayer& layer,
                         const LatentAttentionOptions& options, const LayerInputs& inputs,
                         const LayerCall& call);

/// The options of attention in a call of forward() or forward_training(), whose lengths these are.
AttentionOptions attention_options(const Steps& steps, const LatentHeads& heads,
                                   const LayerCall& call, std::int64_t query_len,
                                   std::int64_t kv_len);

/// Everything up to the output projection.
struct AttendedHeads {
  AttentionOptions options;
  Tensor low, normed_low, queries, compressed, latents;
  Tensor keys, values;  // of the expanded form
  Tensor attended, lse;
};
/// Queries and latents alone.
AttendedHeads project_heads(const Context& context, const LatentHeads& heads,
                            const CheckedInputs& inputs, const LayerCall& call);
/// With `saves`, takes the expanded form and computes lse, for backward.
AttendedHeads attend_heads(const Context& context, const LatentHeads& heads,
                           const CheckedInputs& inputs, const LayerCall& call, bool saves);

/// Moves what backward needs into `saved`, with copies of the inputs, so that it stands alone.
void keep_forward(const Context& context, const CheckedInputs& inputs, const LayerCall& call,
                  AttendedHeads& heads, Saved& saved);

}  // namespace latent
}  // namespace ladon
