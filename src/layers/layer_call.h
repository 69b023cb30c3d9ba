// The checks of a forward call that all layers share.
#pragma once

#include <cstdint>

#include "core/checks.h"
#include "ladon/attention_layer.h"

namespace ladon {

struct LayerCallSizes {
  std::int64_t batch = 0;
  std::int64_t num_heads = 0;
  std::int64_t query_len = 0;
  std::int64_t kv_len = 0;
  bool rope = false;  // positions are read
};

/// Everything in `call`, before anything is computed.
void check_layer_call(const Operation& operation, const LayerCall& call,
                      const LayerCallSizes& sizes);

/// [batch, seq, width] or [seq, width] of this dtype and width, as [batch, seq, width].
ConstTensorView check_tokens(const Operation& operation, const NamedView& argument, DType dtype,
                             std::int64_t width);

}  // namespace ladon
