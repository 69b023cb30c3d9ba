// Values of two rows that the four lanes which share the rows keep in one register each.
#pragma once

#include "cuda/kernels/softmax_state.cuh"
#include "cuda/kernels/tensor_core.cuh"

namespace ladon::cuda::hopper {

/// Two pairs of values, the same for the four lanes of a row. All lanes of the warp call each
/// function. For what is seldom needed: a value is read by a shuffle.
class QuadValues {
 public:
  __device__ __forceinline__ float2 pair(int i) const {
    return make_float2(__shfl_sync(0xffffffffU, part_, i * 2, 4),
                       __shfl_sync(0xffffffffU, part_, i * 2 + 1, 4));
  }
  __device__ __forceinline__ void set_pair(int i, float2 pair) {
    const unsigned lane = fresh(threadIdx.x);
    if ((lane & 2U) != static_cast<unsigned>(i) * 2) return;
    part_ = (lane & 1U) != 0 ? pair.y : pair.x;
  }

  /// The pairs as states of the two rows.
  __device__ __forceinline__ RowState<float> state(int row) const {
    const float2 both = pair(row);
    return {both.x, both.y};
  }
  __device__ __forceinline__ void set(const RowState<float>& first, const RowState<float>& second) {
    set_pair(0, make_float2(first.maximum, first.sum));
    set_pair(1, make_float2(second.maximum, second.sum));
  }

 private:
  float part_;
};

}  // namespace ladon::cuda::hopper
