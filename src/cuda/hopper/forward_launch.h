// Launches of Hopper's forward kernels; each is defined in the file that instantiates it.
#pragma once

#include <cstdint>

#include "cuda/queue.h"

namespace ladon::cuda {

template <class Compute>
struct ForwardParams;

namespace hopper {

struct HopperForwardParams;

/// Columns of K and of V that a kernel computes with; heads that have fewer are padded.
enum class ForwardColumns : std::uint8_t { k64, k128, k192And128, k256 };

void launch_forward_bf16(Queue& queue, int blocks, ForwardColumns columns,
                         const HopperForwardParams& params);
void launch_forward_f16(Queue& queue, int blocks, ForwardColumns columns,
                        const HopperForwardParams& params);
/// The same with all rules.
void launch_forward_rules_bf16(Queue& queue, int blocks, ForwardColumns columns,
                               const HopperForwardParams& params);
void launch_forward_rules_f16(Queue& queue, int blocks, ForwardColumns columns,
                              const HopperForwardParams& params);
/// Computes again what params.unfinished names, with all rules.
void finish_forward_rules_bf16(Queue& queue, const ForwardParams<float>& params);
void finish_forward_rules_f16(Queue& queue, const ForwardParams<float>& params);

}  // namespace hopper
}  // namespace ladon::cuda
