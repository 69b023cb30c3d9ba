// Layers whose heads are shared by the ranks of a communicator: TensorParallelAttention is a
// MultiHeadAttention, TensorParallelLatentAttention a LatentAttention.
//
// Rank r of P has query heads [r H / P, (r + 1) H / P) with their KV heads, and rows [r E / P,
// (r + 1) E / P) of the output projection. H must be a multiple of P, and the KV heads a multiple
// or a divisor of P: where ranks outnumber them, several ranks have the same one. Latents, and what
// they are made with, are the same on every rank. Inputs and outputs are whole on every rank, and
// must be the same on all of them.
//
// Ranks gather the attended values of all heads, project them with their rows, and gather the
// outputs. No sum crosses a rank, so outputs have the bits of one process, for any number of ranks;
// so has a cache, of which each rank holds its own KV heads, or all latents. In backward the
// gradients of inputs and of parameters that several ranks have are sums in the order of ranks: the
// same bits on all ranks and in every run, and parameters that were the same on several ranks stay
// so.
//
// Calls are collective (ladon/communicator.h): all ranks make them, in the same order.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ladon/attention_layer.h"
#include "ladon/communicator.h"
#include "ladon/export.h"
#include "ladon/latent_attention.h"
#include "ladon/multi_head_attention.h"
#include "ladon/spread_cache.h"

namespace ladon {

class CallSignature;
namespace multi_head {
struct LayerHeads;
}
namespace latent {
struct LatentHeads;
}

/// What both layers have in common: weights in slices. LayerCall::weights is not supported.
class LADON_API TensorParallelLayer : public AttentionLayer {
 public:
  /// Rows [first, first + rows) of the whole parameter that a rank has, and the ranks [first_rank,
  /// end_rank) that have the same.
  struct Slice {
    std::int64_t whole_rows = 0;
    std::int64_t first = 0;
    std::int64_t rows = 0;
    int first_rank = 0;
    int end_rank = 0;
  };

  Communicator& communicator() const noexcept { return communicator_; }
  /// Throws where there is no parameter of that name.
  Slice slice_of(std::string_view name, int rank) const;

  /// Copies this rank's slice of a weight of the whole layer; of a mapped file it reads no more.
  /// Not collective.
  void set_whole_parameter(const Context& context, std::string_view name,
                           const ConstTensorView& whole);
  /// The same for all parameters of a whole layer with the same options.
  void set_whole_parameters(const Context& context, const AttentionLayer& whole);
  /// A weight of the whole layer on the host, gathered from all ranks: for saving, one after the
  /// other. Collective.
  Tensor whole_parameter(const Context& context, std::string_view name) const;

  /// clip_gradients() (ladon/optim.h) by the joint norm of the whole layer's gradients: what
  /// several ranks have is counted once. Returns the norm from before. Collective.
  double clip_gradients(const Context& context, double max_norm);

  /// For the library's own use: adds what all ranks must have in common to a call's description.
  void describe(const Context& context, CallSignature& signature) const;

 protected:
  explicit TensorParallelLayer(Communicator& communicator);

  /// Adds zeros for this rank's slice of a parameter that is cut into `parts` by its rows: as many
  /// as ranks, or a divisor.
  Parameter& add_parameter(const std::string& name, DType dtype, const Dims& whole,
                           std::int64_t parts);

  std::string description_;  // of the options

 private:
  struct Cut {
    std::int64_t whole_rows = 0;
    int parts = 1;
  };

  Communicator& communicator_;
  std::vector<Cut> cuts_;  // one for each parameter
};

class LADON_API TensorParallelAttention final : public TensorParallelLayer {
 public:
  /// `options` are the whole layer's. Zero weights, unit norms: set_whole_parameter() sets them.
  /// The communicator must outlive the layer.
  TensorParallelAttention(Communicator& communicator, const MultiHeadAttentionOptions& options);
  ~TensorParallelAttention() override;

  /// The whole layer's, with every default filled in, and those of the heads that are here.
  const MultiHeadAttentionOptions& options() const noexcept { return whole_; }
  const MultiHeadAttentionOptions& own_options() const noexcept { return own_; }
  std::int64_t first_head() const noexcept { return first_head_; }
  std::int64_t first_kv_head() const noexcept { return first_kv_head_; }

  std::string_view type_name() const noexcept override { return "TensorParallelAttention"; }
  std::int64_t embed_dim() const noexcept override { return whole_.embed_dim; }
  std::int64_t num_heads() const noexcept override { return whole_.num_heads; }
  std::int64_t num_kv_heads() const noexcept override { return whole_.num_kv_heads; }
  std::int64_t head_dim() const noexcept override { return whole_.head_dim; }
  std::int64_t value_dim() const noexcept override { return whole_.head_dim; }
  DType dtype() const noexcept override { return whole_.dtype; }
  void to(const Context& context) override;

  using AttentionLayer::forward;
  /// The cache holds this rank's KV heads (cache_options()). Appended on all ranks or on none.
  void forward(const Context& context, const ConstTensorView& x, KvCache& cache,
               const CachedCall& call, const TensorView& out) const override;
  KvCacheOptions cache_options(std::int64_t batch = 1,
                               std::optional<KvFormat> format = {}) const override;

 private:
  multi_head::LayerHeads own_heads() const;
  void run_forward(const Context& context, const LayerInputs& inputs, const LayerCall& call,
                   LayerOutput& out, SavedForward* saved) const override;
  void run_backward(const Context& context, const ConstTensorView& grad_out,
                    const SavedForward& saved, InputGradientOutputs& gradients) override;

  MultiHeadAttentionOptions whole_;
  MultiHeadAttentionOptions own_;
  std::int64_t first_head_ = 0;
  std::int64_t first_kv_head_ = 0;
  Tensor alibi_slopes_;
  std::shared_ptr<const MultiHeadAttention::Plan> plan_;
  std::shared_ptr<const char> identity_;
};

/// Ranks have the rows of their heads of q_proj or q_b_proj and of kv_b_proj; q_a_proj,
/// kv_a_proj_with_mqa and the norms are the same on every rank. So is a KvCache of latents; a
/// SpreadKvCache has each latent on one rank.
class LADON_API TensorParallelLatentAttention final : public TensorParallelLayer {
 public:
  /// As in TensorParallelAttention.
  TensorParallelLatentAttention(Communicator& communicator, const LatentAttentionOptions& options);
  ~TensorParallelLatentAttention() override;

  const LatentAttentionOptions& options() const noexcept { return whole_; }
  const LatentAttentionOptions& own_options() const noexcept { return own_; }
  std::int64_t first_head() const noexcept { return first_head_; }

  std::string_view type_name() const noexcept override { return "TensorParallelLatentAttention"; }
  std::int64_t embed_dim() const noexcept override { return whole_.embed_dim; }
  std::int64_t num_heads() const noexcept override { return whole_.num_heads; }
  std::int64_t num_kv_heads() const noexcept override { return whole_.num_heads; }
  std::int64_t head_dim() const noexcept override { return whole_.nope_dim + whole_.rope_dim; }
  std::int64_t value_dim() const noexcept override { return whole_.value_dim; }
  DType dtype() const noexcept override { return whole_.dtype; }

  using AttentionLayer::forward;
  /// The cache holds all latents. Appended on all ranks or on none.
  void forward(const Context& context, const ConstTensorView& x, KvCache& cache,
               const CachedCall& call, const TensorView& out) const override;

  /// The same over latents that are spread over the ranks of this layer, with as many ranks' memory
  /// for them. The cache is one over the layer's communicator, of cache_options().
  ///
  /// In the absorbed form, that of decoding, ranks gather the queries of all heads, attend over
  /// their own latents and send partial sums to the rank that has the head; latents do not move.
  /// The bits are those that SpreadAttentionOptions promises, with one process's where the rows of
  /// all heads fit one tile. In the expanded form, that of a long chunk, all latents of a sequence
  /// are gathered for the time of the call, and the bits are those of one process.
  void forward(const Context& context, const ConstTensorView& x, SpreadKvCache& cache,
               const CachedCall& call, const TensorView& out,
               const SpreadAttentionOptions& spread = {}) const;
  Tensor forward(const Context& context, const ConstTensorView& x, SpreadKvCache& cache,
                 const CachedCall& call = {}, const SpreadAttentionOptions& spread = {}) const;
  KvCacheOptions cache_options(std::int64_t batch = 1,
                               std::optional<KvFormat> format = {}) const override;

 private:
  latent::LatentHeads own_heads() const;
  void run_forward(const Context& context, const LayerInputs& inputs, const LayerCall& call,
                   LayerOutput& out, SavedForward* saved) const override;
  void run_backward(const Context& context, const ConstTensorView& grad_out,
                    const SavedForward& saved, InputGradientOutputs& gradients) override;

  LatentAttentionOptions whole_;
  LatentAttentionOptions own_;
  std::int64_t first_head_ = 0;
  std::shared_ptr<const LatentAttention::Plan> plan_;
  std::shared_ptr<const char> identity_;
};

}  // namespace ladon
