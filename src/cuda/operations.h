// Every operation of the CUDA backend: each checks what is left to check, takes scratch memory and
// enqueues its kernels. One header for all, because they are the Backend's methods with a Queue.
//
// Lists in the params (sequences, runs, positions, frequencies, parts) are host memory and are
// uploaded here; all other pointers are the device's.
#pragma once

#include <cstdint>
#include <span>

#include "core/attention_params.h"
#include "core/element_params.h"
#include "core/kv_params.h"
#include "core/norm_params.h"
#include "core/optimiser_params.h"
#include "core/projection_params.h"
#include "core/rope_params.h"
#include "core/sum_params.h"
#include "cuda/queue.h"

namespace ladon {

// Of ladon/tensor_view.h and ladon/attention.h: few units of kernels need more.
namespace detail {
template <class Element>
class BasicView;
}  // namespace detail
using TensorView = detail::BasicView<void>;
using ConstTensorView = detail::BasicView<const void>;
enum class ScoreStage : std::uint8_t;
struct RandomFillParams;

}  // namespace ladon

namespace ladon::cuda {

void copy(Queue& queue, const ConstTensorView& from, const TensorView& to);
void zero(Queue& queue, const TensorView& view);
void fill_random(Queue& queue, const RandomFillParams& params);

void attend(Queue& queue, const AttentionParams& params);
void attend_backward(Queue& queue, const AttentionParams& params);
void attention_weights(Queue& queue, const AttentionParams& params, ScoreStage stage,
                       const WeightsOperand& weights);
void merge(Queue& queue, const MergeParams& params);

/// None reads what another one writes.
void project(Queue& queue, std::span<const ProjectionParams> params);
void project_input_gradient(Queue& queue, const ProjectionParams& params);
void project_input_gradients(Queue& queue, std::span<const ProjectionParams> params);
void project_weight_gradients(Queue& queue, std::span<const ProjectionParams> params);

void rms_norm(Queue& queue, const NormParams& params);
void rms_norm_backward(Queue& queue, const NormParams& params);
/// None reads what another one writes.
void rotate(Queue& queue, std::span<const RopeParams> params);
void fill_rope_table(Queue& queue, std::span<const double> frequencies, double magnitude,
                     const TensorView& cos, const TensorView& sin);
void sum_heads(Queue& queue, const HeadSumParams& params);

void write_kv(Queue& queue, const KvRowsParams& params);
/// rotate(), then write_kv(). Where it is one launch for few tokens, prefetches what comes next.
void append_kv(Queue& queue, const AppendSteps& steps, const KvRowsParams& rows);
void gather_kv(Queue& queue, const KvRowsParams& params);

void sgd_step(Queue& queue, const SgdParams& params);
void adamw_step(Queue& queue, const AdamWParams& params);
void accumulate(Queue& queue, const AccumulateParams& params);
void scale(Queue& queue, const FloatArray& array, double factor);
Magnitude magnitude(Queue& queue, std::span<const FloatArray> arrays, int exponent);

}  // namespace ladon::cuda
