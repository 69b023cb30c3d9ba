// Attention by Hopper's own kernels, forward and backward.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/attention_params.h"
#include "cuda/kernels/forward_launch.h"
#include "cuda/queue.h"

namespace ladon::cuda {

template <class Compute>
struct ForwardParams;

namespace backward {
struct BackwardParams;
}

namespace hopper {

/// Enqueues the call and returns true where the kernel (forward.cuh) can compute it and it has
/// enough rows to be worth it; else does nothing. `call` is the host's, `params` the same for
/// kernels, with scores in the units of those rules.
bool attend(Queue& queue, const AttentionParams& call, ForwardParams<float> params,
            ForwardRules rules);

/// The same, without further rules than a window, for few query rows and few segments of keys,
/// whose partial results have memory (decode_segments.cuh).
bool decode_segments(Queue& queue, const AttentionParams& call, ForwardParams<float> params);
/// The same for heads of 129 to 256 columns, however many segments there are, with every rule but
/// dropout (decode_long_heads.cuh).
bool decode_long_heads(Queue& queue, const AttentionParams& call, ForwardParams<float> params,
                       ForwardRules rules);

/// The same for the gradients of q, k and v that the call wants (backward.cuh; for heads above 192,
/// or values above 128, backward_wide_keys.cuh and backward_wide_rows.cuh), after prepare_rows(),
/// with backward_bytes() of scratch memory. The tiles that meet NaN or infinity are left to the
/// careful kernels.
bool attend_backward(Queue& queue, const AttentionParams& call,
                     const backward::BackwardParams& params, std::byte* scratch);
std::size_t backward_bytes(const Queue& queue, const AttentionParams& call,
                           std::int64_t num_row_tiles);

}  // namespace hopper
}  // namespace ladon::cuda
