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

/// What backward() was given, where it is what the layer with this identity saved. Throws Error.
const SavedForward::Impl& check_saved(std::string_view operation, const AttentionLayer& layer,
                                      const SavedForward& saved,
                                      const std::shared_ptr<const char>& identity);

/// The gradient of a layer's output, whose queries' input, [batch, seq, width], was `query`.
void check_grad_out(const Operation& operation, const AttentionLayer& layer, const Tensor& query,
                    bool batched, const ConstTensorView& grad_out);

/// All arguments of backward(); `query` is where a State keeps the queries' input.
template <class State, class Kept>
const State& check_backward(const Operation& operation, const AttentionLayer& layer,
                            const SavedForward& saved, const std::shared_ptr<const char>& identity,
                            Tensor Kept::*query, const ConstTensorView& grad_out) {
  check_device(operation, "layer", layer.device());
  const auto& state = static_cast<const State&>(check_saved(operation, layer, saved, identity));
  check_grad_out(operation, layer, state.*query, state.batched, grad_out);
  return state;
}

}  // namespace ladon
