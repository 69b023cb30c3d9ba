// Which kernels run: asked of the CPU, the operating system and LADON_ISA.
#pragma once

#include <optional>
#include <string>

#include "cpu/cpu_features.h"
#include "ladon/isa.h"

namespace ladon::cpu {

struct KernelTable;

/// The instruction set to use: the one asked for, else LADON_ISA, else the fastest runnable. Throws
/// Error when the one asked for cannot run here, saying why.
Isa choose_isa(std::optional<Isa> asked);
/// The same on a machine with these features.
Isa choose_isa(std::optional<Isa> asked, const CpuFeatures& features);

/// Why an instruction set cannot run on a machine with these features; empty if it can.
std::string refusal_of(Isa isa, const CpuFeatures& features);

/// The kernels of an instruction set that runs here; null for Isa::kReference.
const KernelTable* kernels_for(Isa isa) noexcept;

}  // namespace ladon::cpu
