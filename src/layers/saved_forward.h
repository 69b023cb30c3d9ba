// The base of what layers save for backward; each kind of layer derives its own.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "ladon/attention.h"
#include "ladon/attention_layer.h"

namespace ladon {

class SavedForward::Impl {
 public:
  explicit Impl(std::shared_ptr<const char> layer) : layer_(std::move(layer)) {}
  virtual ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  /// The identity of the layer that saved it. Held, so that no other layer can get that address.
  const std::shared_ptr<const char>& layer() const noexcept { return layer_; }

  /// Keeps the attention's options and the call, with copies of what they pointed to: the caller's
  /// may be gone by then. What belongs to the layer (sinks, slopes) is looked up again.
  void keep_call(const Context& context, const AttentionOptions& attention, const LayerCall& call);

  bool batched = true;       // the inputs had a batch
  AttentionOptions options;  // without the layer's own tensors
  RopePositions query_positions, key_positions;

 private:
  Tensor mask_, bias_;
  std::vector<std::int64_t> kv_lengths_, query_position_list_, key_position_list_;
  std::shared_ptr<const char> layer_;
};

/// What backward() was given, where it is what the layer with this identity saved. Throws Error.
const SavedForward::Impl& check_saved(std::string_view operation, const SavedForward& saved,
                                      const std::shared_ptr<const char>& identity);

}  // namespace ladon
