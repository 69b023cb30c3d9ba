// The drivers of RMS norm and of sums over heads: tasks are blocks of rows.

#include <algorithm>

#include "core/arena.h"
#include "core/element.h"
#include "core/parallel.h"
#include "cpu/backend.h"
#include "cpu/drivers/worker_scratch.h"

namespace ladon::cpu {
namespace {

// Rows of one task. Sums over rows are added task by task in order, so this is a constant.
constexpr std::int64_t kRowsPerTask = 256;

/// The weight in double, its offset added; in backward, each task's sums of its gradient.
struct NormArrays {
  NormArrays(Arena& arena, const NormParams& params, std::int64_t tasks)
      : weight(arena.take<double>(params.weight_rows * params.dim)),
        sums(arena.take<double>(tasks * params.weight_rows * params.dim)) {}

  void load_weight(const NormParams& params) {
    for (std::int64_t row = 0; row < params.weight_rows; ++row) {
      for (std::int64_t i = 0; i < params.dim; ++i) {
        weight[row * params.dim + i] =
            load_element(params.weight.data, params.weight.dtype, row * params.weight.stride + i) +
            params.weight_offset;
      }
    }
  }

  double* weight;
  double* sums;
};

int threads_for(const Workers& workers, std::int64_t elements) {
  return useful_threads(workers, 4 * static_cast<double>(elements));
}

}  // namespace

void CpuBackend::rms_norm(const NormParams& params) {
  const KernelSet& kernels = kernels_for(params.x.dtype);
  InWorkspace<NormArrays> arrays(host().scratch, params, std::int64_t{0});
  const WorkerScratch scratch(host(), kernels.rms_norm_scratch(params));
  arrays->load_weight(params);
  parallel_for(workers(), threads_for(workers(), params.rows * params.dim),
               ceil_div(params.rows, kRowsPerTask), [&](std::int64_t task, int worker) {
                 kernels.rms_norm(params,
                                  {.begin = task * kRowsPerTask,
                                   .end = std::min(params.rows, (task + 1) * kRowsPerTask),
                                   .weight = arrays->weight},
                                  scratch.of(worker));
               });
}

void CpuBackend::rms_norm_backward(const NormParams& params) {
  const KernelSet& kernels = kernels_for(params.x.dtype);
  const std::int64_t tasks = ceil_div(params.rows, kRowsPerTask);
  const std::int64_t elements = params.weight_rows * params.dim;
  InWorkspace<NormArrays> arrays(host().scratch, params, tasks);
  const WorkerScratch scratch(host(), kernels.rms_norm_backward_scratch(params));
  arrays->load_weight(params);
  parallel_for(workers(), threads_for(workers(), params.rows * params.dim), tasks,
               [&](std::int64_t task, int worker) {
                 double* const sums = arrays->sums + task * elements;
                 std::fill_n(sums, elements, 0.0);
                 kernels.rms_norm_backward(params,
                                           {.begin = task * kRowsPerTask,
                                            .end = std::min(params.rows, (task + 1) * kRowsPerTask),
                                            .weight = arrays->weight,
                                            .sums = sums},
                                           scratch.of(worker));
               });
  for (std::int64_t i = 0; i < elements; ++i) {
    const std::int64_t at = i / params.dim * params.dweight.stride + i % params.dim;
    double sum = load_element(params.dweight.data, params.dweight.dtype, at);
    for (std::int64_t task = 0; task < tasks; ++task) sum += arrays->sums[task * elements + i];
    store_element(params.dweight.data, params.dweight.dtype, at, sum);
  }
}

void CpuBackend::sum_heads(const HeadSumParams& params) {
  const KernelSet& kernels = kernels_for(params.x.dtype);
  const WorkerScratch scratch(host(), kernels.sum_heads_scratch(params));
  const std::int64_t row_elements = params.groups * params.group * params.dim;
  parallel_for(workers(), threads_for(workers(), params.rows * row_elements),
               ceil_div(params.rows, kRowsPerTask), [&](std::int64_t task, int worker) {
                 kernels.sum_heads(params,
                                   {.begin = task * kRowsPerTask,
                                    .end = std::min(params.rows, (task + 1) * kRowsPerTask)},
                                   scratch.of(worker));
               });
}

}  // namespace ladon::cpu
