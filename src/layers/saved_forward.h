// The base of what layers save for backward; each kind of layer derives its own.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "core/checks.h"
#include "ladon/attention.h"
#include "ladon/attention_layer.h"
#include "layers/layer_output.h"

namespace ladon {

class SavedForward::Impl {
 public:
  Impl(const AttentionLayer& layer, std::shared_ptr<const char> identity)
      : identity_(std::move(identity)), generation_(generation_of(layer)) {}
  virtual ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  /// Throws Error where another layer saved this, or other weights.
  void check(std::string_view operation, const AttentionLayer& layer,
             const std::shared_ptr<const char>& identity) const;

  /// Keeps the attention's options and the call, with copies of what they pointed to: the caller's
  /// may be gone by then. What belongs to the layer (sinks, slopes) is looked up again.
  void keep_call(const Context& context, const AttentionOptions& attention, const LayerCall& call);

  /// Of the call, as [batch, seq, width]; absent those that it did not have.
  virtual LayerInputs inputs() const = 0;
  /// The shape of one of inputs() as the call gave it.
  Dims given_shape(const ConstTensorView& input) const;

  bool batched = true;       // the inputs had a batch
  AttentionOptions options;  // without the layer's own tensors
  RopePositions query_positions, key_positions;

 private:
  Tensor mask_, bias_;
  std::vector<std::int64_t> kv_lengths_, query_position_list_, key_position_list_;
  static std::uint64_t generation_of(const AttentionLayer& layer) noexcept;

  // Of the layer that saved it. Held, so that no other layer can get that address.
  std::shared_ptr<const char> identity_;
  std::uint64_t generation_;  // of its weights
};

/// All arguments of backward(), where the layer with this identity saved what it was given. Throws
/// Error. Gradients of inputs that the call did not have are not wanted afterwards.
const SavedForward::Impl& check_saved_call(const Operation& operation, const AttentionLayer& layer,
                                           const SavedForward& saved,
                                           const std::shared_ptr<const char>& identity,
                                           const ConstTensorView& grad_out,
                                           InputGradientOutputs& gradients);

/// The same as the State that this kind of layer saves.
template <class State>
const State& check_backward(const Operation& operation, const AttentionLayer& layer,
                            const SavedForward& saved, const std::shared_ptr<const char>& identity,
                            const ConstTensorView& grad_out, InputGradientOutputs& gradients) {
  return static_cast<const State&>(
      check_saved_call(operation, layer, saved, identity, grad_out, gradients));
}

}  // namespace ladon
