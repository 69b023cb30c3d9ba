// The gradients of bias and sinks.
#pragma once

#include <cstddef>
#include <string_view>

#include "attention/problem.h"
#include "cpu/kernel_table.h"
#include "ladon/attention.h"

namespace ladon {

/// dbias and dsinks, where wanted, must fit the options' bias and sinks.
void check_side_gradients(std::string_view operation, const AttentionOptions& options,
                          const AttentionGradients& gradients);

/// Scratch bytes that write_side_gradients() needs for each thread.
std::size_t side_gradient_scratch(const AttentionParams& params, const cpu::KernelSet& kernels,
                                  const AttentionGradients& gradients);
/// `scratch` holds `scratch_stride` bytes for each thread, one after the other.
void write_side_gradients(const Context& context, const Problem& problem,
                          const cpu::KernelSet& kernels, const AttentionGradients& gradients,
                          std::byte* scratch, std::size_t scratch_stride);
void write_side_gradients_by_reference(const Context& context, const Problem& problem,
                                       const AttentionGradients& gradients);

}  // namespace ladon
