// The gradients of bias and sinks.
#pragma once

#include <string_view>

#include "attention/problem.h"
#include "cpu/kernel_table.h"
#include "ladon/attention.h"

namespace ladon {

/// dbias and dsinks, where wanted, must fit the options' bias and sinks.
void check_side_gradients(std::string_view operation, const AttentionOptions& options,
                          const AttentionGradients& gradients);

void write_side_gradients(const Context& context, const Problem& problem,
                          const cpu::KernelSet& kernels, const AttentionGradients& gradients);
void write_side_gradients_by_reference(const Context& context, const Problem& problem,
                                       const AttentionGradients& gradients);

}  // namespace ladon
