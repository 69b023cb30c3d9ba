// attention() and its backward for callers that have checked their arguments themselves: layers.
#pragma once

#include "core/attention_params.h"
#include "ladon/attention.h"
#include "ladon/kv_cache_view.h"

namespace ladon {

void attend(const Context& context, const ConstTensorView& q, const ConstTensorView& k,
            const ConstTensorView& v, const AttentionOptions& options, const TensorView& out,
            const TensorView& lse = {}, const WholeProblem& whole = {});

/// The cache's page tables are those of a KvCache.
void attend(const Context& context, const ConstTensorView& q, const KvCacheView& cache,
            const AttentionOptions& options, const TensorView& out, const TensorView& lse = {},
            const WholeProblem& whole = {});

void attend_backward(const Context& context, const ConstTensorView& q, const ConstTensorView& k,
                     const ConstTensorView& v, const AttentionOptions& options,
                     const AttentionSaved& saved, const AttentionGradients& gradients);

}  // namespace ladon
