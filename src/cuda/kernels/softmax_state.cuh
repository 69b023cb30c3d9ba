// The softmax of one row over some of its keys, and how parts of a row are put together.
//
// Keys are cut into segments (segment_size.cuh), counted from the sequence's first token. Each
// segment starts from nothing, and segments are folded together in ascending order. A row's bits
// are then the same whether one block of threads walks over all its segments or each has its own.
//
// These files are compiled without contraction of a * b + c: what is fused is written so, and no
// choice of the compiler's makes one kernel's bits differ from another's.
#pragma once

#include <cstdint>

#include "core/attention_params.h"
#include "cuda/kernels/attention_rules.cuh"
#include "cuda/kernels/segment_size.cuh"

namespace ladon::cuda {

/// The largest score, and the sum of exp(score - largest). A sum of 0: no key was seen.
template <class Compute>
struct RowState {
  Compute maximum = -static_cast<Compute>(INFINITY);
  Compute sum = 0;
};

/// exp() of differences of scores. Scores of the tensor-core kernels are in any unit: `factor`
/// brings them to powers of two.
struct Base2Exp {
  float factor;
  __device__ float operator()(float difference) const { return exp2f(difference * factor); }
};
template <class Compute>
struct NaturalExp {
  __device__ Compute operator()(Compute difference) const { return exp(difference); }
};

/// How a segment is folded into what came before it.
template <class Compute>
struct Fold {
  RowState<Compute> state;
  Compute earlier = 1;  // factors of the weighted sums
  Compute segment = 0;
  bool takes_earlier = true;
  bool takes_segment = false;

  template <class Exp>
  __device__ Fold(const RowState<Compute>& before, const RowState<Compute>& added, Exp exp_of)
      : state(before) {
    if (added.sum == 0) return;
    takes_segment = true;
    segment = 1;
    takes_earlier = before.sum != 0;
    state = added;
    if (!takes_earlier) return;
    state.maximum = fmax(before.maximum, added.maximum);
    earlier = exp_of(before.maximum - state.maximum);
    segment = exp_of(added.maximum - state.maximum);
    state.sum = fma(before.sum, earlier, added.sum * segment);
  }

  __device__ bool takes_both() const { return takes_segment && takes_earlier; }
  __device__ Compute both(Compute before, Compute added) const {
    return fma(before, earlier, added * segment);
  }
  __device__ Compute operator()(Compute before, Compute added) const {
    if (!takes_segment) return before;
    if (!takes_earlier) return added;
    return both(before, added);
  }
};

/// What a row's weighted sums are multiplied by in the end, and its lse.
template <class Compute>
struct RowResult {
  Compute weight = 0;
  Compute lse = -static_cast<Compute>(INFINITY);
};

/// `maximum` in natural units. `unit` is what a weight of 1 is in the sums.
template <class Compute>
__device__ inline RowResult<Compute> finish_row(const ScoreRules& rules, std::int64_t head,
                                                Compute maximum, Compute sum, Compute unit) {
  if (sum == 0) return {};
  if (rules.sinks.data == nullptr) return {1 / sum, maximum + log(sum / unit)};
  const Compute sink =
      load_element<Compute>(rules.sinks.data, rules.sinks.dtype, head * rules.sinks.stride);
  const Compute largest = fmax(maximum, sink);
  const Compute keys = exp(maximum - largest);
  const Compute total = fma(sum / unit, keys, exp(sink - largest));
  return {keys / unit / total, largest + log(total)};
}

/// A result from its sum; a sum of -0 gives 0. Rounded once, here, by every kernel: whether a
/// negative result that is too small for the type becomes 0 or -0 must not depend on which one ran.
template <class Compute>
__device__ __forceinline__ Compute result_of(Compute sum, Compute weight) {
  return fma(sum, weight, Compute{0});
}

__device__ inline void store_lse(const LseOperand& lse, std::int64_t index, double value) {
  if (lse.is_f64) {
    static_cast<double*>(lse.data)[index] = value;
  } else {
    static_cast<float*>(lse.data)[index] = static_cast<float>(value);
  }
}

/// Unnormalised results of each row and segment, where segments are computed apart:
/// [sequence, kv_head, segment, row].
template <class Compute>
struct Partials {
  Compute* maximum = nullptr;  // null: segments are folded where they are computed
  Compute* sum = nullptr;
  Compute* out = nullptr;  // value_dim elements each
  std::int64_t segments = 0;
  std::int64_t rows = 0;

  __device__ std::int64_t index(std::int64_t sequence_and_head, std::int64_t segment,
                                std::int64_t row) const {
    return (sequence_and_head * segments + segment) * rows + row;
  }
};

}  // namespace ladon::cuda
