// AttentionLayer: what every attention layer offers, so that code can hold any of them.
//
// A layer is made on the host; to() moves its weights to a device. A call runs on its Context's
// device, where the layer, its inputs and its cache must be.
//
// Forward is const and may run in many threads at once; backward adds to the gradients and may not.
// A call that throws has changed nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "ladon/context.h"
#include "ladon/export.h"
#include "ladon/kv_cache.h"
#include "ladon/parameter.h"
#include "ladon/rope.h"
#include "ladon/tensor.h"
#include "ladon/tensor_view.h"

namespace ladon {

/// [batch, seq, width] each, or [seq, width] without a batch; last strides 1. Self-attention gives
/// `query` alone; without `value`, keys and values come from `key`.
struct LayerInputs {
  ConstTensorView query;
  ConstTensorView key{};
  ConstTensorView value{};
};

/// What may differ from call to call.
///
/// Causal, window and ALiBi go by positions. Where query and key have the same length, as in
/// self-attention, query i is at key i, whether the call gives `key` or not, and whatever
/// kv_lengths hides. Where they differ, the last query is at the sequence's last key (that
/// kv_lengths shows), as over a cache: of 5 causal queries over 3 keys, the first two see nothing,
/// and their attention is 0.
struct LayerCall {
  /// Empty: as the layer's options say.
  std::optional<bool> causal{};
  /// As in AttentionOptions: [batch, num_heads, query_len, kv_len], any of them 1.
  ConstTensorView mask{};
  ConstTensorView bias{};
  /// Keys that exist in each sequence of a padded batch.
  std::span<const std::int64_t> kv_lengths{};
  /// For rope. Default: 0, 1, 2, ... for queries and for keys.
  RopePositions query_positions{};
  RopePositions key_positions{};
  /// Dropout's seed; dropout happens in training alone.
  std::uint64_t dropout_seed = 0;
  /// Where it is given, receives the probabilities (before dropout): [batch, num_heads, query_len,
  /// kv_len], any float dtype. Costs what attention_weights() costs.
  TensorView weights{};
};

/// What may differ from one cached call to the next.
struct CachedCall {
  /// Empty: as the layer's options say. Only a causal layer gives, chunk by chunk, what the whole
  /// sequence gives.
  std::optional<bool> causal{};
  /// New tokens of each sequence, where they differ. x is then padded, [batch, seq, embed_dim], and
  /// the rest of each sequence is not read (the output there is 0); or packed, [total, embed_dim].
  std::span<const std::int64_t> new_lengths{};
  /// As in LayerCall; keys count from the oldest that the cache holds. The query dimension is as
  /// long as the most new tokens of a sequence, the key dimension as the longest sequence with
  /// them.
  ConstTensorView mask{};
  ConstTensorView bias{};
  /// What attends in place of the new tokens, which are appended all the same: shape and dtype of
  /// x. Query i sees what token i of x would see.
  ConstTensorView query{};
  /// Positions of the queries, for rope: as many as x has tokens, row by row. Empty: those of the
  /// new tokens.
  std::span<const std::int64_t> query_positions{};
};

class LayerOutput;
struct InputGradientOutputs;

/// Shapes of a call's inputs, as it gave them; of rank 0 for those that it did not have.
struct InputShapes {
  Dims query{};
  Dims key{};
  Dims value{};
};

/// What backward needs of a forward call: the inputs, the projections, their attention and its lse.
/// Linear in the lengths. Belongs to the layer that made it.
class LADON_API SavedForward {
 public:
  SavedForward();
  ~SavedForward();
  SavedForward(SavedForward&&) noexcept;
  SavedForward& operator=(SavedForward&&) noexcept;

  /// Those of the gradients that backward() gives. All of rank 0 when nothing was saved.
  InputShapes input_shapes() const;

  class Impl;
  explicit SavedForward(std::unique_ptr<Impl> impl) noexcept;
  /// For the library's own use; null when nothing was saved.
  const Impl* impl() const noexcept { return impl_.get(); }

 private:
  std::unique_ptr<Impl> impl_;
};

struct TrainingForward {
  Tensor out;
  SavedForward saved;
};

struct CachedForward {
  Tensor out;
  KvCache cache;
};

/// Gradients of a call's inputs; key and value are empty (rank 0) where the call did not give them,
/// and their share is part of the input they came from.
struct InputGradients {
  Tensor query{};
  Tensor key{};
  Tensor value{};
};

/// The caller's memory for them, which has the inputs' shapes and the layer's dtype; the last
/// stride is 1, the others are free. A gradient whose view is absent is not computed.
struct InputGradientViews {
  TensorView query{};
  TensorView key{};
  TensorView value{};
};

class LADON_API AttentionLayer {
 public:
  virtual ~AttentionLayer();

  /// "MultiHeadAttention", ...
  virtual std::string_view type_name() const noexcept = 0;
  virtual std::int64_t embed_dim() const noexcept = 0;
  virtual std::int64_t num_heads() const noexcept = 0;
  virtual std::int64_t num_kv_heads() const noexcept = 0;
  virtual std::int64_t head_dim() const noexcept = 0;
  virtual std::int64_t value_dim() const noexcept = 0;
  virtual DType dtype() const noexcept = 0;

  /// Where the weights are.
  DeviceId device() const noexcept;
  /// Moves weights and gradients to the Context's device. Optimisers that refer to them, and saved
  /// forward calls, are refused until the layer is back on the old device: make them anew.
  virtual void to(const Context& context);

  /// [batch, query_len, embed_dim], or [query_len, embed_dim] where the inputs have no batch.
  Tensor forward(const Context& context, const LayerInputs& inputs,
                 const LayerCall& call = {}) const;
  Tensor forward(const Context& context, const ConstTensorView& x,
                 const LayerCall& call = {}) const {
    return forward(context, LayerInputs{.query = x}, call);
  }
  /// Writes `out` instead: shape and dtype of query, memory that is not an input's. Any strides but
  /// the last, which is 1.
  void forward(const Context& context, const LayerInputs& inputs, const LayerCall& call,
               const TensorView& out) const;
  void forward(const Context& context, const ConstTensorView& x, const LayerCall& call,
               const TensorView& out) const {
    forward(context, LayerInputs{.query = x}, call, out);
  }

  /// Self-attention of new tokens over a cache: appends their keys and values and writes their
  /// output, shape and dtype of x, which is [batch, seq, embed_dim] or, for one sequence, [seq,
  /// embed_dim]. Rope goes on from each sequence's length. All or nothing. Throws where the
  /// cache does not fit the layer. A call of one token for each sequence allocates nothing once it
  /// has run with these sizes (but scratch past 32 MiB, such as the keys and values that a long
  /// latent sequence expands to, and what the cache's own growth takes).
  virtual void forward(const Context& context, const ConstTensorView& x, KvCache& cache,
                       const CachedCall& call, const TensorView& out) const = 0;
  Tensor forward(const Context& context, const ConstTensorView& x, KvCache& cache,
                 const CachedCall& call = {}) const;
  /// The functional form: `past` is not changed, and shared memory is not copied (KvCache::fork).
  CachedForward forward_from(const Context& context, const ConstTensorView& x, const KvCache& past,
                             const CachedCall& call = {}) const;
  /// What a cache for this layer holds. By default in the layer's own dtype.
  virtual KvCacheOptions cache_options(std::int64_t batch = 1,
                                       std::optional<KvFormat> format = {}) const;

  /// Forward that also keeps what backward needs. Dropout acts where is_training().
  TrainingForward forward_training(const Context& context, const LayerInputs& inputs,
                                   const LayerCall& call = {}) const;
  /// Writes `out`, as forward() does.
  SavedForward forward_training(const Context& context, const LayerInputs& inputs,
                                const LayerCall& call, const TensorView& out) const;

  /// Given the gradient of forward_training()'s output, returns those of its inputs and adds to
  /// each parameter's gradient. Throws where the weights have changed since
  /// (Parameter::generation).
  InputGradients backward(const Context& context, const ConstTensorView& grad_out,
                          const SavedForward& saved);
  /// Writes the gradients of inputs to the caller's memory, which must not be grad_out's. Where it
  /// is refused, nothing has been added to any gradient.
  void backward(const Context& context, const ConstTensorView& grad_out, const SavedForward& saved,
                const InputGradientViews& gradients);

  /// In a fixed order; their addresses do not change while the layer lives where it is.
  std::span<Parameter> named_parameters() noexcept { return parameters_; }
  std::span<const Parameter> named_parameters() const noexcept { return parameters_; }
  /// The same as pointers, as optimisers take them.
  std::vector<Parameter*> parameters();
  /// Throws where there is none of that name, and says which there are.
  Parameter& parameter(std::string_view name);
  const Parameter& parameter(std::string_view name) const;
  bool has_parameter(std::string_view name) const noexcept;
  /// Copies a weight in, from the host or the layer's device, converting its dtype. Throws when the
  /// shape does not fit.
  void set_parameter(const Context& context, std::string_view name, const ConstTensorView& value);
  std::int64_t parameter_count() const noexcept;
  void zero_grad(const Context& context);

  void train(bool training = true) noexcept { training_ = training; }
  void eval() noexcept { training_ = false; }
  bool is_training() const noexcept { return training_; }

 protected:
  /// All forms of forward() without a cache, and of forward_training(), which have `saved` filled.
  virtual void run_forward(const Context& context, const LayerInputs& inputs, const LayerCall& call,
                           LayerOutput& out, SavedForward* saved) const = 0;
  virtual void run_backward(const Context& context, const ConstTensorView& grad_out,
                            const SavedForward& saved, InputGradientOutputs& gradients) = 0;

  AttentionLayer() = default;
  AttentionLayer(const AttentionLayer& other);
  AttentionLayer& operator=(const AttentionLayer& other);
  AttentionLayer(AttentionLayer&&) noexcept = default;
  AttentionLayer& operator=(AttentionLayer&&) noexcept = default;

  std::vector<Parameter> parameters_;
  bool training_ = true;
};

}  // namespace ladon
