#include "layers/projection.h"

#include <algorithm>
#include <cstddef>

#include "core/context_impl.h"
#include "core/element.h"
#include "core/integer.h"
#include "core/parallel.h"
#include "core/projection_params.h"
#include "cpu/kernel_table.h"
#include "reference/projection_reference.h"

namespace ladon {
namespace {

Matrix matrix(const ConstTensorView& view) {
  if (view.absent()) return {};
  // One struct serves inputs and outputs.
  return {const_cast<void*>(view.data()), view.dtype(), view.rank() == 1 ? 0 : view.stride(0)};
}

using Kernel = void (*)(const ProjectionParams&, const cpu::ProjectionTask&, void*);
using KernelScratch = std::size_t (*)(const ProjectionParams&);

void move_on(Matrix& matrix, std::int64_t elements) {
  if (matrix.data != nullptr) matrix.data = element_at(matrix.data, matrix.dtype, elements);
}

ProjectionParams of_head(ProjectionParams params, std::int64_t head, const HeadSteps& steps) {
  move_on(params.x, head * steps.x);
  move_on(params.dx, head * steps.x);
  move_on(params.w, head * steps.w);
  move_on(params.y, head * steps.y);
  return params;
}

/// Runs a kernel over all blocks of a [rows, columns] result, for each head; blocks have at most
/// `most_columns`, and fewer where threads would find too few blocks.
void run_blocks(const Context& context, const ProjectionParams& params, std::int64_t rows,
                std::int64_t columns, std::int64_t most_columns, Kernel kernel,
                KernelScratch kernel_scratch, const HeadSteps& steps = {}) {
  const std::int64_t row_blocks = ceil_div(rows, cpu::kProjectionTile);
  constexpr std::int64_t kBlocksPerThread = 4;
  std::int64_t block_columns = most_columns;
  while (block_columns > cpu::kProjectionTile &&
         steps.heads * row_blocks * ceil_div(columns, block_columns) <
             kBlocksPerThread * context.num_threads()) {
    block_columns /= 2;
  }
  const std::int64_t column_blocks = ceil_div(columns, block_columns);
  const std::size_t stride = round_up(kernel_scratch(params), cpu::kScratchAlignment);
  const Workspace scratch(context.impl().workspaces(),
                          static_cast<std::size_t>(context.num_threads()) * stride);
  const std::int64_t blocks = row_blocks * column_blocks;
  parallel_for(context, steps.heads * blocks, [&](std::int64_t number, int worker) {
    const std::int64_t index = number % blocks;
    cpu::ProjectionTask task;
    // Blocks of the same weights follow each other.
    task.row_begin = index % row_blocks * cpu::kProjectionTile;
    task.row_end = std::min(task.row_begin + cpu::kProjectionTile, rows);
    task.column_begin = index / row_blocks * block_columns;
    task.column_end = std::min(task.column_begin + block_columns, columns);
    kernel(of_head(params, number / blocks, steps), task,
           scratch.data() + static_cast<std::size_t>(worker) * stride);
  });
}

/// The context's kernels for this dtype; null for the reference.
const cpu::KernelSet* kernels_for(const Context& context, DType dtype) {
  const cpu::KernelTable* table = context.impl().kernels();
  if (table == nullptr) return nullptr;
  if (dtype == DType::kF64) return &table->f64;
  return dtype == DType::kBF16 ? &table->bf16 : &table->f32;
}

}  // namespace

void project(const Context& context, const ConstTensorView& x, const ConstTensorView& w,
             const ConstTensorView& b, const TensorView& y, const HeadSteps& steps) {
  ProjectionParams params{.rows = x.size(0), .in_features = x.size(1), .out_features = w.size(0)};
  params.x = matrix(x);
  params.w = matrix(w);
  params.b = matrix(b);
  params.y = matrix(y);
  const cpu::KernelSet* kernels = kernels_for(context, x.dtype());
  if (kernels == nullptr) {
    for (std::int64_t h = 0; h < steps.heads; ++h) reference::project(of_head(params, h, steps));
    return;
  }
  run_blocks(context, params, params.rows, params.out_features, kernels->project_columns,
             kernels->project, kernels->project_scratch, steps);
}

void add_input_gradient(const Context& context, const ConstTensorView& dy, const ConstTensorView& w,
                        const TensorView& dx, const HeadSteps& steps) {
  ProjectionParams params{.rows = dy.size(0), .in_features = w.size(1), .out_features = w.size(0)};
  params.w = matrix(w);
  params.y = matrix(dy);
  params.dx = matrix(dx);
  const cpu::KernelSet* kernels = kernels_for(context, dy.dtype());
  if (kernels == nullptr) {
    for (std::int64_t h = 0; h < steps.heads; ++h) {
      reference::project_input_gradient(of_head(params, h, steps));
    }
    return;
  }
  run_blocks(context, params, params.rows, params.in_features, cpu::kProjectionTile,
             kernels->project_input_gradient, kernels->project_input_gradient_scratch, steps);
}

void add_weight_gradient(const Context& context, const ConstTensorView& x,
                         const ConstTensorView& dy, const TensorView& dw, const TensorView& db) {
  ProjectionParams params{.rows = x.size(0), .in_features = x.size(1), .out_features = dy.size(1)};
  params.x = matrix(x);
  params.y = matrix(dy);
  params.dw = matrix(dw);
  params.db = matrix(db);
  const cpu::KernelSet* kernels = kernels_for(context, x.dtype());
  if (kernels == nullptr) return reference::project_weight_gradient(params);
  run_blocks(context, params, params.out_features, params.in_features, cpu::kProjectionTile,
             kernels->project_weight_gradient, kernels->project_weight_gradient_scratch);
}

}  // namespace ladon
