// Which kernels a GPU runs.
#pragma once

namespace ladon::cuda {

/// Every GPU has the generic kernels, which do all there is. Faster ones for some calls come on top
/// of them, and give the same bits.
enum class KernelSet { kGeneric, kHopper };

constexpr bool is_hopper(KernelSet set) { return set == KernelSet::kHopper; }

/// The fastest that the GPU runs, or what the variable LADON_CUDA_KERNELS names: generic or hopper.
/// Throws Error where it names something else, or kernels that the GPU cannot run.
KernelSet choose_kernels(int device_index);

}  // namespace ladon::cuda
