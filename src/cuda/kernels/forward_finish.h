// What follows a forward kernel that computes parts of the keys apart.
#pragma once

#include <cstdint>

#include "cuda/queue.h"

namespace ladon::cuda {

template <class Compute>
struct ForwardParams;

/// Folds params.partials into the call's results. Of the first `folded` segments, the last holds
/// what they all are together.
void fold_partials(Queue& queue, const ForwardParams<float>& params, std::int64_t folded);

/// Computes tiles of 64 rows again, of heads above 128: those with a flag in params.unfinished, of
/// [sequence, kv_head, part, row_tile], the last row tile first.
void finish_streamed_bf16(Queue& queue, const ForwardParams<float>& params, int parts);
void finish_streamed_f16(Queue& queue, const ForwardParams<float>& params, int parts);

}  // namespace ladon::cuda
