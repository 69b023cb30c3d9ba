// The sequences of an attention call on the device: lengths, offsets and page tables as one list.
#pragma once

#include "core/attention_params.h"
#include "cuda/queue.h"

namespace ladon::cuda {

class DeviceSequences {
 public:
  DeviceSequences(Queue& queue, const AttentionParams& params);

  /// The call's params with everything that kernels read on the device.
  const AttentionParams& params() const noexcept { return params_; }

 private:
  HeldList held_;
  AttentionParams params_;
};

}  // namespace ladon::cuda
