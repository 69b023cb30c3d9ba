// The gradients of bias and sinks.
#pragma once

#include <cstddef>

#include "core/workers.h"
#include "cpu/drivers/worker_scratch.h"

namespace ladon::cpu {

/// Scratch bytes per worker for write_side_gradients().
std::size_t side_gradient_scratch(const AttentionParams& params, const KernelSet& kernels);
/// Writes dbias and dsinks, where they are present.
void write_side_gradients(const Workers& workers, const AttentionParams& params,
                          const KernelSet& kernels, const RowScales& scales,
                          const WorkerScratch& scratch);

}  // namespace ladon::cpu
