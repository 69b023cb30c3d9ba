// The projections' driver: tasks are blocks of the result, for each head.

#include <algorithm>
#include <cstddef>

#include "core/element.h"
#include "core/parallel.h"
#include "cpu/backend.h"
#include "cpu/drivers/worker_scratch.h"

namespace ladon::cpu {
namespace {

/// One of the three products, and the size of its result's blocks.
struct BlockedProduct {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t most_columns = kProjectionTile;  // of a block
  void (*kernel)(const ProjectionParams&, const ProjectionTask&, Scratch) = nullptr;
  std::size_t (*kernel_scratch)(const ProjectionParams&) = nullptr;
};

/// Runs a kernel over all blocks of a [rows, columns] result, for each head. Blocks are narrower
/// than product.most_columns where there would be too few of them for the threads.
void run_blocks(Host& host, const ProjectionParams& params, const BlockedProduct& product) {
  const std::int64_t heads = params.steps.heads;
  const std::int64_t row_blocks = ceil_div(product.rows, kProjectionTile);
  constexpr std::int64_t kBlocksPerThread = 4;
  const int threads = useful_threads(
      host.workers, static_cast<double>(heads * params.in_features * params.out_features) *
                        static_cast<double>(params.rows));
  std::int64_t block_columns = product.most_columns;
  while (threads > 1 && block_columns > kProjectionTile &&
         heads * row_blocks * ceil_div(product.columns, block_columns) <
             kBlocksPerThread * threads) {
    block_columns /= 2;
  }
  const std::int64_t column_blocks = ceil_div(product.columns, block_columns);
  const WorkerScratch scratch(host, product.kernel_scratch(params));
  const std::int64_t blocks = row_blocks * column_blocks;
  interruptible_for(
      host.workers, threads, heads * blocks, [&](std::int64_t task_index, int worker) {
        const std::int64_t index = task_index % blocks;
        ProjectionTask task;
        // Consecutive blocks have the same weights.
        task.row_begin = index % row_blocks * kProjectionTile;
        task.row_end = std::min(task.row_begin + kProjectionTile, product.rows);
        task.column_begin = index / row_blocks * block_columns;
        task.column_end = std::min(task.column_begin + block_columns, product.columns);
        product.kernel(of_head(params, task_index / blocks), task, scratch.of(worker));
      });
}

}  // namespace

void CpuBackend::project(const ProjectionParams& params) {
  const KernelSet& kernels = kernels_for(params.x.dtype);
  run_blocks(host(), params,
             {.rows = params.rows,
              .columns = params.out_features,
              .most_columns = kernels.project_columns,
              .kernel = kernels.project,
              .kernel_scratch = kernels.project_scratch});
}

void CpuBackend::project_input_gradient(const ProjectionParams& params) {
  const KernelSet& kernels = kernels_for(params.y.dtype);
  run_blocks(host(), params,
             {.rows = params.rows,
              .columns = params.in_features,
              .kernel = kernels.project_input_gradient,
              .kernel_scratch = kernels.project_input_gradient_scratch});
}

void CpuBackend::project_weight_gradient(const ProjectionParams& params) {
  const KernelSet& kernels = kernels_for(params.x.dtype);
  run_blocks(host(), params,
             {.rows = params.out_features,
              .columns = params.in_features,
              .kernel = kernels.project_weight_gradient,
              .kernel_scratch = kernels.project_weight_gradient_scratch});
}

}  // namespace ladon::cpu
